"""KV transfers: fetched complete or not at all, only with the token of the run, and until the offer expires."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from relays_here import TOKEN

from infra.transport import kv_transfer
from infra.transport.endpoint import Endpoint
from infra.transport.frames import PeerUnreachable, TransportError
from infra.transport.kv_transfer import KVTransfers
from schemas.records import PolicyVersion

VERSION = PolicyVersion(1, 2)
MAX_BYTES = 40_000_000


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def source(clock: Clock) -> Iterator[KVTransfers]:
    transfers = KVTransfers("run", Endpoint(token=TOKEN), MAX_BYTES, offer_s=5.0, clock=clock)
    yield transfers
    transfers.close()


@pytest.fixture
def destination() -> Iterator[KVTransfers]:
    transfers = KVTransfers("run", Endpoint(token=TOKEN), MAX_BYTES)
    yield transfers
    transfers.close()


def random_bytes(count: int) -> memoryview:
    return memoryview(np.random.default_rng(0).integers(0, 256, count, np.uint8).data)


@pytest.mark.parametrize("count", [1, 1000, 8 << 20, (8 << 20) + 1, 36_000_000])
def test_fetch_returns_the_offered_bytes(source: KVTransfers, destination: KVTransfers, count: int) -> None:
    manifest = source.offer(VERSION, 7, random_bytes(count))
    assert manifest is not None
    assert (manifest.policy_version, manifest.tokens, manifest.bytes) == (VERSION, 7, count)
    assert bytes(destination.fetch(manifest).result(20)) == bytes(random_bytes(count))
    # Within the process it is returned at once and removed.
    assert bytes(source.fetch(manifest).result(0)) == bytes(random_bytes(count))
    for transfers in (source, destination):
        with pytest.raises(TransportError):
            transfers.fetch(manifest).result(20)


def test_unreachable_address_of_kv_is_logged_once(
    source: KVTransfers, destination: KVTransfers, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = source.offer(VERSION, 7, random_bytes(1000))
    assert manifest is not None
    source.close()
    for _ in range(2):
        with pytest.raises(PeerUnreachable):
            destination.fetch_now(manifest)
    (line,) = caplog.messages
    assert manifest.address in line
    assert "set relay.advertise" in line


def test_unreachable_address_is_tried_again_after_a_while(
    source: KVTransfers, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def refuse(address: str, *others: object) -> None:
        tried.append(address)
        raise PeerUnreachable(f"{address}: refused")

    destination = KVTransfers("run", Endpoint(token=TOKEN), MAX_BYTES, clock=clock)
    manifest = source.offer(VERSION, 7, random_bytes(1000))
    assert manifest is not None
    with monkeypatch.context() as patched:
        patched.setattr(kv_transfer, "dial", refuse)
        for _ in range(2):
            with pytest.raises(PeerUnreachable):
                destination.fetch_now(manifest)
    assert (tried, destination.unreachable()) == ([source.address], (source.address,))
    clock.now = 31.0
    assert destination.unreachable() == ()
    assert bytes(destination.fetch_now(manifest)) == bytes(random_bytes(1000))
    destination.close()


def test_fetch_of_empty_kv_needs_no_transfer(source: KVTransfers, destination: KVTransfers) -> None:
    manifest = source.offer(VERSION, 7, memoryview(b""))
    assert manifest is not None
    assert bytes(destination.fetch(manifest).result(0)) == b""


def test_offers_that_are_not_fetched_expire(source: KVTransfers, destination: KVTransfers, clock: Clock) -> None:
    first = source.offer(VERSION, 7, random_bytes(30_000_000))
    assert first is not None
    assert source.offer(VERSION, 7, random_bytes(20_000_000)) is None
    clock.now = 5.1
    assert source.offer(VERSION, 7, random_bytes(20_000_000)) is not None
    with pytest.raises(TransportError, match="no bytes"):
        destination.fetch(first).result(20)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"chunk_checksums": (1,)}, "corrupted"),
        ({"chunk_checksums": ()}, "0 chunks"),
        ({"name": "0" * 32}, "no bytes"),
        ({"name": "0" * 5000}, "closed|reset"),
        ({"bytes": MAX_BYTES + 1}, "at most"),
        ({"bytes": -1}, "at most"),
        ({"bytes": 2000}, "closed|reset"),
        ({"chunk_bytes": 0}, "at most"),
        ({"chunk_bytes": 1 << 40}, "at most"),
        ({"address": "nowhere"}, "nowhere"),
        ({"address": "127.0.0.1:1"}, "refused"),
        ({"policy_version": PolicyVersion(1, 3)}, "no bytes"),
    ],
)
def test_fetch_raises_for_an_invalid_manifest(
    source: KVTransfers, destination: KVTransfers, changes: dict[str, object], reason: str
) -> None:
    manifest = source.offer(VERSION, 7, random_bytes(1000))
    assert manifest is not None
    with pytest.raises(TransportError, match=reason):
        destination.fetch(replace(manifest, **changes)).result(20)  # type: ignore[arg-type]


@pytest.mark.parametrize(("run", "token"), [("other", TOKEN), ("run", "another-token-entirely")])
def test_fetch_raises_for_another_run_or_token(source: KVTransfers, run: str, token: str) -> None:
    manifest = source.offer(VERSION, 7, random_bytes(1000))
    assert manifest is not None
    other = KVTransfers(run, Endpoint(token=token), MAX_BYTES)
    with pytest.raises(TransportError, match="run"):
        other.fetch(manifest).result(20)
    other.close()


def test_fetch_raises_when_the_source_is_gone(source: KVTransfers, destination: KVTransfers) -> None:
    manifest = source.offer(VERSION, 7, random_bytes(1000))
    assert manifest is not None
    source.close()
    with pytest.raises(TransportError, match="refused"):
        destination.fetch(manifest).result(20)
