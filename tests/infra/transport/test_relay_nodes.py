"""Relays over real sockets: broadcast, repair, joins, several versions, and nothing that is not what it should be."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from relays_here import CHUNK, Machine, delta_of, machines, manifest_of, put, tell, until, weights

from infra.store.chunks import checks_of
from schemas.records import PolicyVersion, TensorSpec


@pytest.mark.parametrize("schedule", ["chain", "tree", "binomial"])
def test_a_version_reaches_every_relay_bit_for_bit(schedule: str) -> None:
    data = weights(1)
    manifest = manifest_of("1.1", data)
    with machines(5) as relays:
        put(relays[0].store, manifest, data)
        tell(relays, manifest, schedule=schedule)
        for relay in relays:
            until(lambda relay=relay: relay.has("1.1"), f"relay {relay.relay} has nothing")
            assert relay.bytes_of("1.1") == data.tobytes()
        received = [relay.node.receiving.passed for relay in relays]
    assert received == [0] + [len(data)] * 4  # nobody pulls anything twice


def test_a_chunk_is_passed_on_before_the_version_is_whole() -> None:
    """The middle one is slow; the last one is never more than a few chunks behind it."""
    data = weights(2)
    manifest = manifest_of("1.1", data)
    with machines(3, rate=4e6) as relays:
        put(relays[0].store, manifest, data)
        tell(relays, manifest)
        last = relays[2].node
        until(lambda: (arrival := last.arriving()) and arrival.arrived > 2 * CHUNK)
        assert not relays[1].has("1.1")
        until(lambda: relays[2].has("1.1"))


def test_no_chunk_is_copied_on_its_way_from_memory_to_memory() -> None:
    """All that Python allocates for three relays while a version goes through them is less than a part of a chunk."""
    data = weights(30, 8.0)
    large = 1 << 20
    manifest = manifest_of("1.1", data, chunk_bytes=large, chunks=checks_of(memoryview(data), large))
    with machines(3) as relays:
        put(relays[0].store, manifest, data)
        tracemalloc.start()
        try:
            tell(relays, manifest)
            until(lambda: all(relay.has("1.1") for relay in relays))
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert relays[2].bytes_of("1.1") == data.tobytes()
    assert most < large // 2


def test_the_newest_counts_and_nobody_goes_back() -> None:
    old, new = weights(3), weights(4)
    manifests = manifest_of("1.1", old), manifest_of("2.0", new)
    with machines(2) as relays:
        put(relays[0].store, manifests[0], old)
        put(relays[0].store, manifests[1], new)
        tell(relays, *manifests)
        until(lambda: relays[1].has("2.0"))
        tell(relays, manifests[0])  # a number that goes back is no news
        data = weights(5)
        third = manifest_of("2.1", data)
        put(relays[0].store, third, data)
        tell(relays, manifests[0], third)
        until(lambda: relays[1].has("2.1"))
        assert not relays[1].has("1.1")


def test_two_versions_of_one_name_do_not_mix() -> None:
    """The master has other bytes under this name: they are not taken for what the manifest says."""
    mine, told = weights(6), weights(7)
    with machines(2) as relays:
        put(relays[0].store, manifest_of("1.1", mine), mine)
        tell(relays, manifest_of("1.1", told))
        until(lambda: relays[1].node.sending is not None and relays[1].node.counts.lost == 0)
        data = weights(8)
        manifest = manifest_of("1.2", data)
        put(relays[0].store, manifest, data)
        tell(relays, manifest_of("1.1", told), manifest)
        until(lambda: relays[1].has("1.2"))
        assert not relays[1].has("1.1")


def test_who_joins_pulls_from_all_that_are_complete() -> None:
    data = weights(9, 2.0)
    manifest = manifest_of("1.1", data)
    with machines(4) as relays:
        for relay in relays[:3]:
            put(relay.store, manifest, data)
        tell(relays, manifest, joining=[3])
        until(lambda: relays[3].has("1.1"))
        assert relays[3].bytes_of("1.1") == data.tobytes()
        sent = [relay.node.sending.passed for relay in relays[:3]]
    assert sum(sent) == len(data)
    assert min(sent) > len(data) // 4


def test_relays_that_join_together_feed_each_other() -> None:
    data = weights(10, 2.0)
    manifest = manifest_of("1.1", data)
    with machines(6) as relays:
        for relay in relays[:2]:
            put(relay.store, manifest, data)
        tell(relays, manifest, joining=[2, 3, 4, 5])
        for relay in relays[2:]:
            until(lambda relay=relay: relay.has("1.1"))
            assert relay.bytes_of("1.1") == data.tobytes()
        sent = [relay.node.sending.passed for relay in relays]
    assert sum(sent) == 4 * len(data)
    assert sum(sent[2:]) >= len(data)


def test_a_lost_relay_costs_its_successor_the_chunks_under_way() -> None:
    data = weights(11, 2.0)
    manifest = manifest_of("1.1", data)
    with machines(4, rate=6e6) as relays:
        put(relays[0].store, manifest, data)
        tell(relays, manifest)
        last = relays[2].node
        until(lambda: (arrival := last.arriving()) and arrival.arrived > 4 * CHUNK)
        relays[1].node.close()
        for relay in relays[2:]:
            until(lambda relay=relay: relay.has("1.1"))
            assert relay.bytes_of("1.1") == data.tobytes()
        assert last.counts.lost >= 1
        assert len(data) <= last.receiving.passed <= len(data) + 2 * CHUNK


def test_what_has_arrived_stays_while_nobody_has_the_rest() -> None:
    """The only source is gone for longer than it takes to find that there is no other; then there is one."""
    data = weights(19, 2.0)
    manifest = manifest_of("1.1", data)
    with machines(3, rate=6e6) as relays:
        put(relays[0].store, manifest, data)
        tell(relays[:2], manifest)
        last = relays[1].node
        until(lambda: (arrival := last.arriving()) and arrival.arrived > 4 * CHUNK)
        relays[0].node.close()
        until(lambda: last.counts.lost > 6)
        put(relays[2].store, manifest, data)
        tell([relays[2], relays[1]], manifest)
        until(lambda: relays[1].has("1.1"))
        assert relays[1].bytes_of("1.1") == data.tobytes()
        assert last.receiving.passed <= len(data) + 2 * CHUNK


def test_a_slow_relay_does_not_slow_those_before_it() -> None:
    data = weights(20)
    manifest = manifest_of("1.1", data)
    with machines(2) as fast, machines(2, first=2, rate=1e6) as slow:
        put(fast[0].store, manifest, data)
        tell([*fast, *slow], manifest)
        until(lambda: fast[1].has("1.1"))
        assert sum(relay.node.receiving.passed for relay in slow) < len(data) // 2


def test_one_that_is_back_after_long_has_the_newest_in_full() -> None:
    """What it has is no version's parent any more, and versions in between have gone."""
    files = [weights(21)]
    for step in range(1, 6):
        files.append(files[-1].copy())
        files[-1][1000 + step : 2000 : 10] ^= 1
    manifests = [manifest_of("1.0", files[0])]
    with machines(2, keep=2) as relays:
        for relay in relays:
            put(relay.store, manifests[0], files[0])
        for step in range(1, 6):
            delta, short = delta_of(manifests[-1], *files[step - 1 : step + 1])
            manifests.append(manifest_of(f"1.{step}", files[step], delta=short))
            put(relays[0].store, manifests[-1], files[step])
            relays[0].store.add_delta(manifests[-1].version, delta)
            relays[0].store.evict()
        tell(relays, *manifests[-2:], joining=[1])
        until(lambda: relays[1].has("1.5"))
        assert relays[1].bytes_of("1.5") == files[5].tobytes()
        assert relays[1].node.receiving.passed == len(files[5])


def test_an_older_version_comes_when_trajectories_run_under_it() -> None:
    files = [weights(seed) for seed in (22, 23, 24)]
    manifests = [manifest_of(f"1.{number}", file) for number, file in enumerate(files, 1)]
    with machines(3) as relays:
        for relay in relays[:2]:
            for manifest, file in zip(manifests, files, strict=True):
                put(relay.store, manifest, file)
        relays[2].store.say_live([manifests[0].version])
        tell(relays, *manifests)
        until(lambda: relays[2].has("1.1"))
        assert relays[2].bytes_of("1.1") == files[0].tobytes()
        assert relays[2].store.versions() == [manifests[2].version, manifests[0].version]


def test_the_newest_does_not_wait_for_an_older_one() -> None:
    files = [weights(25, 4.0), weights(26, 0.1), weights(27, 0.1)]
    manifests = [manifest_of(f"1.{number}", file) for number, file in enumerate(files, 1)]
    with machines(2, rate=1e6) as relays:
        for manifest, file in zip(manifests[:2], files, strict=False):
            put(relays[0].store, manifest, file)
        relays[1].store.say_live([manifests[0].version])
        tell(relays, *manifests[:2])
        until(lambda: (arrival := relays[1].node.arriving()) and arrival.version == manifests[0].version)
        put(relays[0].store, manifests[2], files[2])
        tell(relays, *manifests)
        until(lambda: relays[1].has("1.3"))
        assert not relays[1].has("1.1")


def test_memory_is_ready_before_the_next_version_comes() -> None:
    files = [weights(seed) for seed in (28, 29)]
    manifests = [manifest_of(f"1.{number}", file) for number, file in enumerate(files, 1)]
    with machines(2) as relays:
        put(relays[0].store, manifests[0], files[0])
        tell(relays, manifests[0])
        spare = relays[1].store.root / "spare.partial"
        until(lambda: relays[1].has("1.1") and spare.exists())
        ready = spare.stat().st_ino
        put(relays[0].store, manifests[1], files[1])
        tell(relays, *manifests)
        until(lambda: relays[1].has("1.2"))
        assert relays[1].store.path(manifests[1].version).stat().st_ino == ready


def test_the_masters_place_is_taken_by_who_has_the_version() -> None:
    data = weights(12)
    manifest = manifest_of("1.1", data)
    with machines(3) as relays:
        put(relays[1].store, manifest, data)
        tell(relays, manifest)  # the master itself lacks it: it pulls from one that has it
        until(lambda: all(relay.has("1.1") for relay in relays))


def test_a_store_keeps_its_bound_and_the_relay_hands_out_what_is_left() -> None:
    with machines(2, keep=2) as relays:
        manifests = []
        for number in range(1, 6):
            data = weights(number)
            manifests.append(manifest_of(f"1.{number}", data))
            put(relays[0].store, manifests[-1], data)
            relays[0].store.evict()
            tell(relays, *manifests)
            until(lambda number=number: relays[1].has(f"1.{number}"))
            assert len(relays[1].store.versions()) <= 2
        assert relays[1].store.newest() == PolicyVersion(1, 5)


def test_a_delta_is_pulled_where_the_parent_is_here_and_else_the_whole() -> None:
    old = weights(13)
    new = old.copy()
    new[1000:2000:10] ^= 1
    parent = manifest_of("1.1", old)
    delta, short = delta_of(parent, old, new)
    child = manifest_of("1.2", new, delta=short)
    with machines(4) as relays:
        put(relays[0].store, parent, old)
        tell(relays[:3], parent)
        until(lambda: all(relay.has("1.1") for relay in relays[:3]))
        before = [relay.node.receiving.passed for relay in relays]
        put(relays[0].store, child, new)
        relays[0].store.add_delta(child.version, delta)
        tell(relays, parent, child)  # the fourth is new, and lacks the parent
        until(lambda: all(relay.has("1.2") for relay in relays))
        assert {relay.bytes_of("1.2") for relay in relays} == {new.tobytes()}
        got = [relay.node.receiving.passed - was for relay, was in zip(relays, before, strict=True)]
    assert got == [0, len(delta), len(delta), len(new)]


def test_a_delta_that_makes_something_else_is_left_for_the_whole() -> None:
    old, other, new = weights(14), weights(15), weights(16)
    parent = manifest_of("1.1", old)
    wrong, short = delta_of(parent, old, other)
    child = manifest_of("1.2", new, delta=short)
    with machines(2) as relays:
        for relay in relays:
            put(relay.store, parent, old)
        put(relays[0].store, child, new)
        relays[0].store.add_delta(child.version, wrong)
        tell(relays, parent, child)
        until(lambda: relays[1].has("1.2"))
        assert relays[1].bytes_of("1.2") == new.tobytes()
        assert relays[1].node.counts.corrupted == 1


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ({"blake3": "ab" * 32}, "blake3"),
        ({"bytes": 77}, "chunks"),
        ({"chunk_bytes": 0}, "chunks of 0 bytes"),
        ({"chunk_bytes": 1 << 40}, "chunks of 1099511627776 bytes"),
        ({"chunks": ()}, "0 chunks"),
        ({"bytes": -5}, "-5 bytes"),
        ({"tensors": (TensorSpec("w", "BF16", (77,)),)}, "its tensors take"),
        ({"tensors": (TensorSpec("w", "BF16", (-1,)),)}, "has shape"),
        ({"tensors": (TensorSpec("w", "BF16", (2, 262_144)),)}, "its tensors"),  # as many elements in another shape
        ({"tensors": (TensorSpec("v", "BF16", (524_288,)),)}, "its tensors are not those of its bytes"),
        ({"tensors": ()}, ""),
    ],
)
def test_a_manifest_that_lies_is_told_and_leaves_nothing(lie: dict[str, object], reason: str) -> None:
    data = weights(17)
    manifest = manifest_of("1.1", data, **lie)
    with machines(2) as relays:
        put(relays[0].store, manifest_of("1.1", data), data)
        if "blake3" in lie:  # the master's seal agrees with the lie: the bytes decide
            path = relays[0].store.root / "1.1.json"
            path.write_text(path.read_text().replace(manifest_of("1.1", data).blake3, "ab" * 32))
        tell(relays, manifest)
        if not reason:
            until(lambda: relays[1].has("1.1"))
            return
        ((told, why),) = until(relays[1].node.lies)
        assert told == manifest
        assert reason in why
        assert not relays[1].has("1.1")
        assert not list(relays[1].store.root.glob("*.partial"))


def test_relays_of_two_runs_do_not_mix() -> None:
    data = weights(18)
    manifest = manifest_of("1.1", data)
    stranger = Machine(1, run="another")
    with machines(1) as relays:
        try:
            put(relays[0].store, manifest, data)
            tell([relays[0], stranger], manifest)
            until(lambda: stranger.node.counts.lost > 1)
            assert not stranger.has("1.1")
            assert relays[0].node.sending.passed == 0
        finally:
            stranger.close()


def test_a_chain_that_is_shuffled_while_versions_go_out_loses_nothing() -> None:
    """Relays change places at random while versions go out: in the end everybody has the newest, bit for bit."""
    random = np.random.default_rng(3)
    with machines(4, rate=3e7) as relays:
        manifests = []
        for number in range(1, 7):
            data = weights(number)
            manifests.append(manifest_of(f"1.{number}", data))
            put(relays[0].store, manifests[-1], data)
            relays[0].store.evict()
            order = [0, *(1 + random.permutation(3)).tolist()]
            tell([relays[each] for each in order], *manifests)
            if number < 6:
                until(lambda: any(relay.node.arriving() for relay in relays[1:]))
        until(lambda: all(relay.has("1.6") for relay in relays))
        assert {relay.bytes_of("1.6") for relay in relays} == {weights(6).tobytes()}
