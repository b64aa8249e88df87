"""Decoding any bytes returns records or raises UndecodableRecord, in bounded time and memory."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from record_samples import PROMPT, SAMPLES, TRAJECTORY, VERSION

from schemas import records as r
from schemas.arrow import arrow_schema
from schemas.block_codec import decode_all
from schemas.codec import MAX_VALUE_BYTES, UndecodableRecord, decode, encode
from schemas.columns import token_ids

KINDS = list(SAMPLES)
ENCODED = {kind: encode(record) for kind, record in SAMPLES.items()}
NAMES = st.sampled_from(KINDS)
quick = settings(max_examples=150, deadline=None)


def decodes(value: bytes, headers: object) -> bool:
    """Whether `value` decodes; otherwise it must raise UndecodableRecord."""
    try:
        rows = decode(value, headers)
    except UndecodableRecord:
        return False
    return len(rows) > 0


@quick
@given(kind=NAMES, value=st.binary(max_size=3000))
@example(kind=r.Trajectory, value=b"")
@example(kind=r.Settled, value=b"[" * 2000)
@example(kind=r.Settled, value=b"\xff\xfe\x00")
def test_decode_rejects_garbage(kind: type, value: bytes) -> None:
    assert not decodes(value, ENCODED[kind][1])


@quick
@given(kind=NAMES, data=st.data())
def test_decode_rejects_truncated_value(kind: type, data: st.DataObject) -> None:
    value, headers = ENCODED[kind]
    assert not decodes(value[: data.draw(st.integers(0, len(value) - 1))], headers)


@settings(max_examples=600, deadline=None)
@given(kind=NAMES, data=st.data())
def test_decode_survives_flipped_bits(kind: type, data: st.DataObject) -> None:
    value, headers = ENCODED[kind]
    damaged = bytearray(value)
    for bit in data.draw(st.lists(st.integers(0, 8 * len(value) - 1), min_size=1, max_size=6)):
        damaged[bit // 8] ^= 1 << bit % 8
    decodes(bytes(damaged), headers)


@quick
@given(kind=NAMES, number=st.integers(0, 2**64 - 1), data=st.data())
def test_decode_survives_absurd_numbers(kind: type, number: int, data: st.DataObject) -> None:
    value, headers = ENCODED[kind]
    at = data.draw(st.integers(0, max(0, len(value) // 4 - 2))) * 4
    decodes(value[:at] + number.to_bytes(8, "little") + value[at + 8 :], headers)


def test_decode_bounds_memory_for_large_integers() -> None:
    value, headers = ENCODED[r.Trajectory]
    pool = pa.default_memory_pool()
    before = pool.max_memory()
    tracemalloc.start()
    try:
        for at in range(0, len(value) - 8, 4):
            decodes(value[:at] + (2**40).to_bytes(8, "little") + value[at + 8 :], headers)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20
    assert pool.max_memory() < before + (32 << 20)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_decode_rejects_compressed_batch(codec: str) -> None:
    value, headers = ENCODED[r.Trajectory]
    schema = arrow_schema(r.Trajectory)
    batch = pa.ipc.read_record_batch(pa.py_buffer(value), schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_batch(batch)
    _, message = (each.serialize().to_pybytes() for each in pa.ipc.MessageReader.open_stream(sink.getvalue()))
    assert pa.ipc.read_record_batch(pa.py_buffer(message), schema).equals(batch)
    with pytest.raises(UndecodableRecord, match="compressed"):
        decode(message, headers)


def test_codec_enforces_size_limit() -> None:
    _, headers = ENCODED[r.Trajectory]
    with pytest.raises(UndecodableRecord, match="over the limit"):
        decode(bytes(MAX_VALUE_BYTES + 1), headers)
    with pytest.raises(ValueError, match="larger than"):
        encode(replace(PROMPT, text="x" * MAX_VALUE_BYTES))


def test_decode_rejects_batch_without_rows() -> None:
    batch = pa.RecordBatch.from_pylist([], schema=arrow_schema(r.Trajectory))
    with pytest.raises(UndecodableRecord):
        decode(batch.serialize().to_pybytes(), ENCODED[r.Trajectory][1])


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ([], "no laminar-schema"),
        ([("laminar-schema", b"Nonsense/9")], "unknown schema"),
        ([("laminar-schema", b"Settled/3")], "unknown schema"),
        ([("laminar-schema", b"Settled")], "unknown schema"),
        ([("laminar-schema", b"\xff" * 5000)], "unknown schema"),
    ],
)
def test_decode_rejects_unknown_schema(headers: list[tuple[str, bytes]], reason: str) -> None:
    with pytest.raises(UndecodableRecord, match=reason):
        decode(ENCODED[r.Settled][0], headers)


@pytest.mark.parametrize("schema", ["Settled/1", "GroupsOffered/1", "WeightVersion/2"])
def test_decode_names_the_release_of_an_old_record(schema: str) -> None:
    headers = (("content-type", b"application/json"), ("laminar-schema", schema.encode()))
    error = f"unknown schema b'{schema}', of release 0.1.0"
    with pytest.raises(UndecodableRecord, match=error):
        decode(b"{}", headers)
    assert decode_all([ENCODED[r.Settled][0], b"{}"], [ENCODED[r.Settled][1], headers]).contents[1] == error


def test_decode_rejects_tombstone() -> None:
    with pytest.raises(UndecodableRecord, match="tombstone"):
        decode(None, ENCODED[r.Settled][1])


STATUS = json.loads(ENCODED[r.ReplicaStatus][0])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"colour": 1}, "unknown fields"),
        ({"running": "3"}, "running: expected int, got str"),
        ({"running": 3.0}, "running: expected int, got float"),
        ({"running": True}, "running: expected int, got bool"),
        ({"running": 2**63}, "beyond 64 bits"),
        ({"running": None}, "running is null"),
        ({"state": "unknown"}, "is not one of"),
        ({"state": ["running"]}, "unhashable|is not one of"),
        ({"host": "\ud800"}, "not JSON .*surrogate"),
    ],
)
def test_decode_rejects_json_field_of_wrong_type(change: dict[str, object], reason: str) -> None:
    with pytest.raises(UndecodableRecord, match=reason):
        decode(json.dumps(STATUS | change).encode(), ENCODED[r.ReplicaStatus][1])


def test_decode_names_missing_json_field() -> None:
    with pytest.raises(UndecodableRecord, match=r"missing fields \['state'\]"):
        decode(json.dumps({k: v for k, v in STATUS.items() if k != "state"}).encode(), ENCODED[r.ReplicaStatus][1])


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400])
def test_decode_rejects_json_number_not_finite(number: str) -> None:
    value = ENCODED[r.Metric][0].replace(b"0.75", number.encode())
    assert value != ENCODED[r.Metric][0]
    with pytest.raises(UndecodableRecord):
        decode(value, ENCODED[r.Metric][1])


@pytest.mark.parametrize("text", ["1.12\n", "١.2", "1", "-1.2", "1.2.3", "9" * 4301 + ".1", "+1.1", " 1.1"])
def test_policy_version_parse_rejects_other_text(text: str) -> None:
    with pytest.raises(ValueError, match="not a policy version"):
        r.PolicyVersion.parse(text)


@pytest.mark.parametrize(
    "record",
    [
        replace(SAMPLES[r.Settled], outcome="unknown"),
        replace(SAMPLES[r.Settled], tokens=1.5),
        replace(SAMPLES[r.Settled], tokens=None),
        replace(SAMPLES[r.Settled], trajectory_id=5),
        replace(SAMPLES[r.Metric], values={"loss": float("nan")}),
        replace(SAMPLES[r.ReplicaStatus], policy_version=r.PolicyVersion(-1, 2)),
        replace(SAMPLES[r.Experience], reward=float("nan")),
        replace(SAMPLES[r.Experience], reward=None),
        replace(SAMPLES[r.Experience], components=(r.RewardComponent("a", float("inf"), 1.0),)),
        replace(TRAJECTORY, member=1.5),
        replace(TRAJECTORY, member=2**63),
        replace(TRAJECTORY, finish_reason="tired"),
        replace(TRAJECTORY, text="\ud800"),
        replace(TRAJECTORY, prompt=None),
        replace(PROMPT, token_ids=pa.array([1, 2], pa.int64())),
        replace(PROMPT, token_ids=token_ids([1, None])),
        replace(PROMPT, sampling=replace(PROMPT.sampling, temperature=float("inf"))),
    ],
    ids=lambda record: type(record).__name__,
)
def test_encode_rejects_invalid_value(record: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        encode(record)


def batch_with(kind: type, **columns: pa.Array) -> bytes:
    """The sample of `kind` with some columns replaced, as a writer without checks would send it."""
    schema = arrow_schema(kind)
    batch = pa.ipc.read_record_batch(pa.py_buffer(ENCODED[kind][0]), schema)
    arrays = [columns.get(name.replace(".", "_"), batch.column(name)) for name in schema.names]
    return pa.RecordBatch.from_arrays(arrays, names=schema.names).serialize().to_pybytes()


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        (r.Experience, {"reward": pa.array([None], pa.float64())}),
        (r.Experience, {"reward": pa.array([float("nan")], pa.float64())}),
        (r.Trajectory, {"text": pa.array([None], pa.utf8())}),
        (r.Trajectory, {"finish_reason": pa.array(["tired"], pa.utf8())}),
        (r.Trajectory, {"newest_version_epoch": pa.array([None], pa.int64())}),
        (r.Trajectory, {"prompt_token_ids": pa.array([None], pa.list_(pa.int32()))}),
        (r.Trajectory, {"prompt_token_ids": pa.array([[1, None]], pa.list_(pa.int32()))}),
        (r.Trajectory, {"prompt_sampling_stop_token_ids": pa.array([[1, None]], pa.list_(pa.int64()))}),
        (r.Trajectory, {"text": pa.array([b"\xff\xfe"], pa.binary())}),
        (r.Assignment, {"partial_logprobs": pa.array([None], pa.list_(pa.float32()))}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value.__name__,
)
def test_decode_rejects_arrow_column_of_wrong_type(kind: type, columns: dict[str, pa.Array]) -> None:
    with pytest.raises(UndecodableRecord):
        decode(batch_with(kind, **columns), ENCODED[kind][1])


def test_decode_accepts_rebuilt_batch() -> None:
    assert decode(batch_with(r.Trajectory), ENCODED[r.Trajectory][1]) == [TRAJECTORY]
    assert TRAJECTORY.policy_version == VERSION
