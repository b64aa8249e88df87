"""KV as parcels: fetched whole or not at all, by who may, and kept no longer than it must."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from infra.transport.frames import TransportError
from infra.transport.kv_transfer import KVTransfers
from infra.transport.relay_node import Endpoint
from schemas.records import PolicyVersion

VERSION = PolicyVersion(1, 2)
MOST = 40_000_000


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def source(clock: Clock) -> Iterator[KVTransfers]:
    it = KVTransfers("run", Endpoint(token="t"), MOST, keep_s=5.0, clock=clock)
    yield it
    it.close()


@pytest.fixture
def destination() -> Iterator[KVTransfers]:
    it = KVTransfers("run", Endpoint(token="t"), MOST)
    yield it
    it.close()


def some(count: int) -> memoryview:
    return memoryview(np.random.default_rng(0).integers(0, 256, count, np.uint8).data)


@pytest.mark.parametrize("count", [1, 1000, 8 << 20, (8 << 20) + 1, 36_000_000])
def test_a_parcel_arrives_whole(source: KVTransfers, destination: KVTransfers, count: int) -> None:
    parcel = source.offer(VERSION, 7, some(count))
    assert parcel is not None
    assert (parcel.policy_version, parcel.tokens, parcel.bytes) == (VERSION, 7, count)
    assert bytes(destination.fetch(parcel).result(20)) == bytes(some(count))
    # At once within a process, which is then rid of it.
    assert bytes(source.fetch(parcel).result(0)) == bytes(some(count))
    for who in (source, destination):
        with pytest.raises(TransportError):
            who.fetch(parcel).result(20)


def test_what_has_no_bytes_need_not_be_fetched(source: KVTransfers, destination: KVTransfers) -> None:
    parcel = source.offer(VERSION, 7, memoryview(b""))
    assert parcel is not None
    assert bytes(destination.fetch(parcel).result(0)) == b""


def test_what_nobody_fetches_makes_room_after_a_while(
    source: KVTransfers, destination: KVTransfers, clock: Clock
) -> None:
    first = source.offer(VERSION, 7, some(30_000_000))
    assert first is not None
    assert source.offer(VERSION, 7, some(20_000_000)) is None
    clock.now = 5.1
    assert source.offer(VERSION, 7, some(20_000_000)) is not None
    with pytest.raises(TransportError, match="no bytes"):
        destination.fetch(first).result(20)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"checks": (1,)}, "damaged"),
        ({"checks": ()}, "0 chunks"),
        ({"name": "0" * 32}, "no bytes"),
        ({"name": "0" * 5000}, "closed|reset"),
        ({"bytes": MOST + 1}, "at most"),
        ({"bytes": -1}, "at most"),
        ({"bytes": 2000}, "closed|reset"),
        ({"chunk_bytes": 0}, "at most"),
        ({"chunk_bytes": 1 << 40}, "at most"),
        ({"address": "nowhere"}, "nowhere"),
        ({"address": "127.0.0.1:1"}, "refused"),
        ({"policy_version": PolicyVersion(1, 3)}, "no bytes"),
    ],
)
def test_a_claim_that_lies_gets_nothing(
    source: KVTransfers, destination: KVTransfers, changes: dict[str, object], reason: str
) -> None:
    parcel = source.offer(VERSION, 7, some(1000))
    assert parcel is not None
    with pytest.raises(TransportError, match=reason):
        destination.fetch(replace(parcel, **changes)).result(20)  # type: ignore[arg-type]


@pytest.mark.parametrize(("run", "token"), [("other", "t"), ("run", "?")])
def test_strangers_get_nothing(source: KVTransfers, run: str, token: str) -> None:
    parcel = source.offer(VERSION, 7, some(1000))
    assert parcel is not None
    stranger = KVTransfers(run, Endpoint(token=token), MOST)
    with pytest.raises(TransportError, match="run"):
        stranger.fetch(parcel).result(20)
    stranger.close()


def test_what_dies_with_its_process_is_known_to_be_gone(source: KVTransfers, destination: KVTransfers) -> None:
    parcel = source.offer(VERSION, 7, some(1000))
    assert parcel is not None
    source.close()
    with pytest.raises(TransportError, match="refused"):
        destination.fetch(parcel).result(20)
