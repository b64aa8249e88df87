"""Relay nodes over real sockets: broadcast, repair, joining relays, several versions, and verification."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from relays_here import CHUNK, Machine, configure, delta_of, held, machines, manifest_of, store_version, until, weights

from infra.store.chunks import chunk_checksums
from infra.transport import serving
from schemas.records import PolicyVersion, TensorSpec, WeightVersion


@pytest.mark.parametrize("schedule", ["chain", "tree", "binomial"])
def test_broadcast_reaches_every_relay_bit_for_bit(schedule: str) -> None:
    data = weights(1)
    manifest = manifest_of("1.1", data)
    with machines(5) as relays:
        store_version(relays[0].store, manifest, data)
        configure(relays, manifest, schedule=schedule)
        for relay in relays:
            until(lambda relay=relay: relay.has("1.1"), f"relay {relay.relay} has nothing")
            assert relay.bytes_of("1.1") == data.tobytes()
        received = [relay.node.receiving.bytes_passed for relay in relays]
    assert received == [0] + [len(data)] * 4  # no byte is transferred twice


@pytest.fixture
def _patient_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that does not know a version yet waits longer before it says so, and another source is taken."""
    monkeypatch.setattr(serving, "UNKNOWN_TIMEOUT_S", 60.0)


@pytest.mark.usefixtures("_patient_sources")
def test_relay_forwards_chunks_before_its_version_is_complete() -> None:
    """The last relay has chunks of the middle one, which gets no more than half."""
    data = weights(2)
    manifest = manifest_of("1.1", data)
    with machines(3) as relays:
        store_version(relays[0].store, manifest, data)
        last = relays[2].node
        with held(relays[1].node.receiving, 8 * CHUNK):
            configure(relays, manifest)
            until(lambda: (arrival := last.arriving()) and arrival.arrived > 2 * CHUNK)
            assert not relays[1].has("1.1")
            assert relays[1].node.sending.bytes_passed > 0
        until(lambda: relays[2].has("1.1"))


def test_transfer_does_not_copy_chunks() -> None:
    """While a version passes through three relays, Python allocates less than half a chunk."""
    data = weights(30, 8.0)
    large = 1 << 20
    manifest = manifest_of("1.1", data, chunk_bytes=large, chunk_checksums=chunk_checksums(memoryview(data), large))
    with machines(3) as relays:
        store_version(relays[0].store, manifest, data)
        tracemalloc.start()
        try:
            configure(relays, manifest)
            until(lambda: all(relay.has("1.1") for relay in relays))
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert relays[2].bytes_of("1.1") == data.tobytes()
    assert most < large // 2


def test_relay_fetches_the_newest_version_only() -> None:
    old, new = weights(3), weights(4)
    manifests = manifest_of("1.1", old), manifest_of("2.0", new)
    with machines(2) as relays:
        store_version(relays[0].store, manifests[0], old)
        store_version(relays[0].store, manifests[1], new)
        configure(relays, *manifests)
        until(lambda: relays[1].has("2.0"))
        configure(relays, manifests[0])  # an older manifest alone has no effect
        data = weights(5)
        third = manifest_of("2.1", data)
        store_version(relays[0].store, third, data)
        configure(relays, manifests[0], third)
        until(lambda: relays[1].has("2.1"))
        assert not relays[1].has("1.1")


def test_relay_rejects_other_bytes_of_the_same_version() -> None:
    """The master has other bytes under this version: relays do not accept them for the manifest."""
    stored, announced = weights(6), weights(7)
    with machines(2) as relays:
        store_version(relays[0].store, manifest_of("1.1", stored), stored)
        configure(relays, manifest_of("1.1", announced))
        until(lambda: relays[1].node.sending is not None and relays[1].node.counts.lost == 0)
        data = weights(8)
        manifest = manifest_of("1.2", data)
        store_version(relays[0].store, manifest, data)
        configure(relays, manifest_of("1.1", announced), manifest)
        until(lambda: relays[1].has("1.2"))
        assert not relays[1].has("1.1")


def test_joining_relay_pulls_from_all_complete_relays() -> None:
    data = weights(9, 2.0)
    manifest = manifest_of("1.1", data)
    with machines(4) as relays:
        for relay in relays[:3]:
            store_version(relay.store, manifest, data)
        configure(relays, manifest, joining=[3])
        until(lambda: relays[3].has("1.1"))
        assert relays[3].bytes_of("1.1") == data.tobytes()
        sent = [relay.node.sending.bytes_passed for relay in relays[:3]]
    assert sum(sent) == len(data)
    assert min(sent) > len(data) // 4


def test_joining_relays_pull_from_each_other() -> None:
    data = weights(10, 2.0)
    manifest = manifest_of("1.1", data)
    with machines(6) as relays:
        for relay in relays[:2]:
            store_version(relay.store, manifest, data)
        configure(relays, manifest, joining=[2, 3, 4, 5])
        for relay in relays[2:]:
            until(lambda relay=relay: relay.has("1.1"))
            assert relay.bytes_of("1.1") == data.tobytes()
        sent = [relay.node.sending.bytes_passed for relay in relays]
    assert sum(sent) == 4 * len(data)
    assert sum(sent[2:]) >= len(data)


@pytest.mark.usefixtures("_patient_sources")
def test_lost_source_costs_only_chunks_in_flight() -> None:
    data = weights(11, 2.0)
    manifest = manifest_of("1.1", data)
    with machines(4) as relays:
        store_version(relays[0].store, manifest, data)
        last = relays[2].node
        with held(last.receiving, 6 * CHUNK):
            configure(relays, manifest)
            until(lambda: (arrival := last.arriving()) and arrival.arrived > 4 * CHUNK)
            relays[1].node.close()
        for relay in relays[2:]:
            until(lambda relay=relay: relay.has("1.1"))
            assert relay.bytes_of("1.1") == data.tobytes()
        assert last.counts.lost >= 1
        assert len(data) <= last.receiving.bytes_passed <= len(data) + 2 * CHUNK


def test_arrived_chunks_are_kept_without_a_source() -> None:
    """The only source is gone until all retries have failed; then another source appears."""
    data = weights(19, 2.0)
    manifest = manifest_of("1.1", data)
    with machines(3) as relays:
        store_version(relays[0].store, manifest, data)
        last = relays[1].node
        with held(last.receiving, 6 * CHUNK):
            configure(relays[:2], manifest)
            until(lambda: (arrival := last.arriving()) and arrival.arrived > 4 * CHUNK)
            relays[0].node.close()
        until(lambda: last.counts.lost > 6)
        store_version(relays[2].store, manifest, data)
        configure([relays[2], relays[1]], manifest)
        until(lambda: relays[1].has("1.1"))
        assert relays[1].bytes_of("1.1") == data.tobytes()
        assert last.receiving.bytes_passed <= len(data) + 2 * CHUNK


def test_slow_relay_does_not_delay_earlier_relays() -> None:
    data = weights(20)
    manifest = manifest_of("1.1", data)
    with machines(2) as fast, machines(2, first=2, rate=1e5) as slow:
        store_version(fast[0].store, manifest, data)
        configure([*fast, *slow], manifest)
        until(lambda: fast[1].has("1.1"))
        assert sum(relay.node.receiving.bytes_passed for relay in slow) < len(data) // 2


def test_relay_with_an_outdated_parent_fetches_in_full() -> None:
    """Its stored version is no longer the parent of any delta, and versions in between were evicted."""
    files = [weights(21)]
    for step in range(1, 6):
        files.append(files[-1].copy())
        files[-1][1000 + step : 2000 : 10] ^= 1
    manifests = [manifest_of("1.0", files[0])]
    with machines(2, keep=2) as relays:
        for relay in relays:
            store_version(relay.store, manifests[0], files[0])
        for step in range(1, 6):
            delta, short = delta_of(manifests[-1], *files[step - 1 : step + 1])
            manifests.append(manifest_of(f"1.{step}", files[step], delta=short))
            store_version(relays[0].store, manifests[-1], files[step])
            relays[0].store.add_delta(manifests[-1].version, delta)
            relays[0].store.evict()
        configure(relays, *manifests[-2:], joining=[1])
        until(lambda: relays[1].has("1.5"))
        assert relays[1].bytes_of("1.5") == files[5].tobytes()
        assert relays[1].node.receiving.bytes_passed == len(files[5])


def test_relay_fetches_an_older_version_that_is_live() -> None:
    files = [weights(seed) for seed in (22, 23, 24)]
    manifests = [manifest_of(f"1.{number}", file) for number, file in enumerate(files, 1)]
    with machines(3) as relays:
        for relay in relays[:2]:
            for manifest, file in zip(manifests, files, strict=True):
                store_version(relay.store, manifest, file)
        relays[2].store.write_live_versions([manifests[0].version])
        configure(relays, *manifests)
        until(lambda: relays[2].has("1.1"))
        assert relays[2].bytes_of("1.1") == files[0].tobytes()
        assert relays[2].store.versions() == [manifests[2].version, manifests[0].version]


def test_newest_version_preempts_an_older_fetch() -> None:
    files = [weights(25, 4.0), weights(26, 0.1), weights(27, 0.1)]
    manifests = [manifest_of(f"1.{number}", file) for number, file in enumerate(files, 1)]
    with machines(2, rate=1e6) as relays:
        for manifest, file in zip(manifests[:2], files, strict=False):
            store_version(relays[0].store, manifest, file)
        relays[1].store.write_live_versions([manifests[0].version])
        configure(relays, *manifests[:2])
        until(lambda: (arrival := relays[1].node.arriving()) and arrival.version == manifests[0].version)
        store_version(relays[0].store, manifests[2], files[2])
        configure(relays, *manifests)
        until(lambda: relays[1].has("1.3"))
        assert not relays[1].has("1.1")


def test_relay_reserves_memory_for_the_next_version() -> None:
    files = [weights(seed) for seed in (28, 29)]
    manifests = [manifest_of(f"1.{number}", file) for number, file in enumerate(files, 1)]
    with machines(2) as relays:
        store_version(relays[0].store, manifests[0], files[0])
        configure(relays, manifests[0])
        spare = relays[1].store.root / "spare.partial"
        until(lambda: relays[1].has("1.1") and spare.exists())
        ready = spare.stat().st_ino
        store_version(relays[0].store, manifests[1], files[1])
        configure(relays, *manifests)
        until(lambda: relays[1].has("1.2"))
        assert relays[1].store.path(manifests[1].version).stat().st_ino == ready


def test_master_without_the_version_pulls_it_from_a_relay() -> None:
    data = weights(12)
    manifest = manifest_of("1.1", data)
    with machines(3) as relays:
        store_version(relays[1].store, manifest, data)
        configure(relays, manifest)  # the master lacks it and pulls from a relay that has it
        until(lambda: all(relay.has("1.1") for relay in relays))


def store_next(relay: Machine, number: int) -> WeightVersion:
    """Store version 1.`number` at `relay` without the ones that it no longer needs; its manifest."""
    data = weights(number)
    manifest = manifest_of(f"1.{number}", data)
    store_version(relay.store, manifest, data)
    relay.store.evict()
    return manifest


def test_store_keeps_its_limit_during_broadcasts() -> None:
    with machines(2, keep=2) as relays:
        manifests = []
        for number in range(1, 6):
            manifests.append(store_next(relays[0], number))
            configure(relays, *manifests)
            until(lambda number=number: relays[1].has(f"1.{number}"))
            assert len(relays[1].store.versions()) <= 2
        assert relays[1].store.newest() == PolicyVersion(1, 5)


def begins_or_has(relay: Machine, version: PolicyVersion) -> bool:
    now = relay.node.arriving()
    return (now is not None and now.version == version) or relay.has(str(version))


def test_busy_relay_frees_evicted_versions() -> None:
    """While a version arrives, the next one can be fetched already: the relay is never idle."""
    with machines(2, rate=5e5, keep=2) as relays:
        manifests = []
        for number in (1, 2, 3):
            manifests.append(store_next(relays[0], number))
            configure(relays, *manifests)
            until(lambda version=manifests[-1].version: begins_or_has(relays[1], version))
        maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(relays[1].store.root) in line]
        assert [line for line in maps if line.endswith("(deleted)")] == []


def test_relay_fetches_a_delta_only_with_its_parent() -> None:
    old = weights(13)
    new = old.copy()
    new[1000:2000:10] ^= 1
    parent = manifest_of("1.1", old)
    delta, short = delta_of(parent, old, new)
    child = manifest_of("1.2", new, delta=short)
    with machines(4) as relays:
        store_version(relays[0].store, parent, old)
        configure(relays[:3], parent)
        until(lambda: all(relay.has("1.1") for relay in relays[:3]))
        before = [relay.node.receiving.bytes_passed for relay in relays]
        store_version(relays[0].store, child, new)
        relays[0].store.add_delta(child.version, delta)
        configure(relays, parent, child)  # the fourth lacks the parent
        until(lambda: all(relay.has("1.2") for relay in relays))
        assert {relay.bytes_of("1.2") for relay in relays} == {new.tobytes()}
        fetched = [relay.node.receiving.bytes_passed - was for relay, was in zip(relays, before, strict=True)]
    assert fetched == [0, len(delta), len(delta), len(new)]


def test_relay_fetches_in_full_after_a_wrong_delta() -> None:
    old, other, new = weights(14), weights(15), weights(16)
    parent = manifest_of("1.1", old)
    wrong, short = delta_of(parent, old, other)
    child = manifest_of("1.2", new, delta=short)
    with machines(2) as relays:
        for relay in relays:
            store_version(relay.store, parent, old)
        store_version(relays[0].store, child, new)
        relays[0].store.add_delta(child.version, wrong)
        configure(relays, parent, child)
        until(lambda: relays[1].has("1.2"))
        assert relays[1].bytes_of("1.2") == new.tobytes()
        assert relays[1].node.counts.corrupted == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"blake3": "ab" * 32}, "blake3"),
        ({"bytes": 77}, "chunks"),
        ({"chunk_bytes": 0}, "chunks of 0 bytes"),
        ({"chunk_bytes": 1 << 40}, "chunks of 1099511627776 bytes"),
        ({"chunk_checksums": ()}, "0 chunks"),
        ({"bytes": -5}, "-5 bytes"),
        ({"tensors": (TensorSpec("w", "BF16", (77,)),)}, "its tensors take"),
        ({"tensors": (TensorSpec("w", "BF16", (-1,)),)}, "has a negative dimension"),
        (
            {"tensors": (TensorSpec("w", "BF16", (2, 262_144)),)},
            "its tensors",
        ),  # another shape
        ({"tensors": (TensorSpec("v", "BF16", (524_288,)),)}, "its tensors do not match the header"),
        ({"tensors": ()}, ""),
    ],
)
def test_invalid_manifest_is_reported_and_leaves_no_files(changes: dict[str, object], reason: str) -> None:
    data = weights(17)
    manifest = manifest_of("1.1", data, **changes)
    with machines(2) as relays:
        store_version(relays[0].store, manifest_of("1.1", data), data)
        if "blake3" in changes:  # the master's seal agrees with the manifest: the bytes decide
            path = relays[0].store.root / "1.1.json"
            path.write_text(path.read_text().replace(manifest_of("1.1", data).blake3, "ab" * 32))
        configure(relays, manifest)
        if not reason:
            until(lambda: relays[1].has("1.1"))
            return
        ((announced, why),) = until(relays[1].node.take_invalid_manifests)
        assert announced == manifest
        assert reason in why
        assert not relays[1].has("1.1")
        assert not list(relays[1].store.root.glob("*.partial"))


def test_relays_of_two_runs_do_not_connect() -> None:
    data = weights(18)
    manifest = manifest_of("1.1", data)
    stranger = Machine(1, run="another")
    with machines(1) as relays:
        try:
            store_version(relays[0].store, manifest, data)
            configure([relays[0], stranger], manifest)
            until(lambda: stranger.node.counts.lost > 1)
            assert not stranger.has("1.1")
            assert relays[0].node.sending.bytes_passed == 0
        finally:
            stranger.close()


def test_broadcast_survives_changes_of_the_chain() -> None:
    """The chain is shuffled while versions are published: in the end every relay has the newest, bit for bit."""
    random = np.random.default_rng(3)
    with machines(4, rate=3e7) as relays:
        manifests = []
        for number in range(1, 7):
            manifests.append(store_next(relays[0], number))
            order = [0, *(1 + random.permutation(3)).tolist()]
            configure([relays[each] for each in order], *manifests)
            if number < 6:
                version = f"1.{number}"
                until(lambda version=version: any(each.node.arriving() or each.has(version) for each in relays[1:]))
        until(lambda: all(relay.has("1.6") for relay in relays))
        assert {relay.bytes_of("1.6") for relay in relays} == {weights(6).tobytes()}
