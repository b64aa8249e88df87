"""What a stage accepts from its leader and from the stage before it."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from infra.transport.array_messages import receive_message, send_message
from infra.transport.frames import FrameKind, ProtocolError, TransportError, send_chunk
from infra.transport.kv_transfer import decode_parts, encode_parts
from infra.transport.throttle import Link
from operators.rollout.staged.member import WeightClaims
from operators.rollout.staged.stage import decode_plan, encode_plan
from operators.rollout.step_plan import Decode, plan_extension, plan_prefill
from schemas.records import KVManifest, PolicyVersion

LINK = Link()
V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def test_message_arrives_with_its_arrays(pair: tuple[socket.socket, socket.socket]) -> None:
    sent = [np.arange(6).reshape(2, 3), np.zeros((0, 4), np.uint8), np.array([7], np.uint8)]
    send_message(pair[0], LINK, "step", sent, row=3)
    message = receive_message(pair[1], LINK, 1 << 20)
    assert (message.kind, message.body) == ("step", {"row": 3})
    assert [array.tolist() for array in message.arrays] == [array.tolist() for array in sent]
    assert [array.shape for array in message.arrays] == [array.shape for array in sent]


@pytest.mark.parametrize(
    ("listed", "data", "reason"),
    [
        (b"nonsense", b"", "cannot be decoded"),
        (b'[["object",[1]]]', b"12345678", "does not hold"),
        (b'[["uint8",[9]]]', b"12345678", "does not hold"),
        (b'[["uint8",[-1]]]', b"12345678", "does not hold"),
        (b'[["uint8",[4]]]', b"12345678", "4 bytes that belong to no array"),
        (b'[["int64",[1,1,1,1,1]]]', b"12345678", "does not hold"),
        (b'[["uint8",[0,1000000000000000000000000]]]', b"", "of shape"),
        (b'[["uint8",[0,4611686018427387904,4611686018427387904]]]', b"", "of shape"),
        (b"[" * 100_000, b"", "cannot be decoded"),
    ],
)
def test_message_with_other_bytes_than_its_arrays_is_refused(
    pair: tuple[socket.socket, socket.socket], listed: bytes, data: bytes, reason: str
) -> None:
    payload = memoryview(listed + data)
    send_chunk(pair[0], payload, LINK, kind=FrameKind.ARRAYS, message="step", listed=len(listed))
    with pytest.raises(ProtocolError, match=reason):
        receive_message(pair[1], LINK, 1 << 20)


def test_message_over_the_limit_is_refused_unread(pair: tuple[socket.socket, socket.socket]) -> None:
    send_message(pair[0], LINK, "hidden", [np.zeros(2000, np.uint8)])
    with pytest.raises(ProtocolError, match="at most 1000 are accepted"):
        receive_message(pair[1], LINK, 1000)


def plan() -> list[np.ndarray]:
    contexts = [np.array([1, 2, 3]), np.array([4, 5])]
    blocks = [plan_extension(np.array([8, 9]), 2, 4), *plan_prefill(contexts, [3, 4], 64)]
    return encode_plan(Decode(np.array([6, 7]), np.array([4, 5]), 1), blocks)


def test_plan_is_restored_without_its_tokens() -> None:
    step, blocks = decode_plan(plan(), rows=8, context=16)
    assert step is not None
    assert (step.positions.tolist(), step.first_row) == ([4, 5], 1)
    assert [(block.token_ids.shape, block.start) for block in blocks] == [((1, 2), 4), ((2, 3), 0)]
    assert [block.row.tolist() for block in blocks] == [[2, 2], [3, 3, 3, 4, 4]]
    assert decode_plan(encode_plan(None, blocks), 8, 16)[0] is None


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda arrays: arrays.pop(), id="an array is missing"),
        pytest.param(lambda arrays: arrays[0].__setitem__(0, 16), id="position behind the context"),
        pytest.param(lambda arrays: arrays[0].__setitem__(0, -1), id="negative position"),
        pytest.param(lambda arrays: arrays[1].__setitem__(0, 7), id="row behind the last"),
        pytest.param(lambda arrays: arrays[2].__setitem__((0, 1), 1 << 40), id="huge block"),
        pytest.param(lambda arrays: arrays[2].__setitem__((0, 3), 1), id="counts do not agree"),
        pytest.param(lambda arrays: arrays[3].__setitem__(0, 2), id="token behind its block"),
        pytest.param(lambda arrays: arrays[4].__setitem__(0, 8), id="KV row behind the last"),
        pytest.param(lambda arrays: arrays.__setitem__(5, arrays[5].astype(np.int32)), id="another type"),
    ],
)
def test_plan_out_of_range_is_refused(change: Callable[[list[np.ndarray]], object]) -> None:
    arrays = [array.copy() for array in plan()]
    change(arrays)
    with pytest.raises(ProtocolError):
        decode_plan(arrays, rows=8, context=16)


def test_parts_of_kv_are_restored_from_their_list() -> None:
    parts = [KVManifest("h:1", "a", V1, 5, 9, 8, (3, 4)), KVManifest("h:2", "b", V1, 5, 0, 8, ())]
    assert decode_parts(encode_parts(parts)) == parts


@pytest.mark.parametrize("change", [{"bytes": -1}, {"tokens": "5"}, {"policy_version": "x"}, {"more": 1}])
def test_invalid_list_of_parts_is_refused(change: dict[str, object]) -> None:
    (listed,) = json.loads(bytes(encode_parts([KVManifest("h:1", "a", V1, 5, 9, 8, (3,))])))
    with pytest.raises(TransportError, match="cannot be decoded"):
        decode_parts(memoryview(json.dumps([listed | change]).encode()))


def test_claims_admit_one_version_at_a_time() -> None:
    claims = WeightClaims()
    with claims.claiming("a", V1) as free:
        assert free
    with claims.claiming("b", V2) as free:
        assert not free
    with claims.claiming("c", V1) as free:
        assert free
    claims.release("a")
    assert (claims.version, claims.version_besides("c")) == (V1, None)
    with claims.changing(V2) as free:
        assert not free
    claims.release("c")
    with claims.changing(V2) as free:
        assert free


def test_claim_of_a_failed_load_is_not_kept() -> None:
    claims = WeightClaims()
    with pytest.raises(OSError, match="gone"), claims.claiming("a", V1):
        raise OSError("gone")
    assert claims.version is None
