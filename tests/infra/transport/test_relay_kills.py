"""`kill -9` of real relay processes: in the middle of the chain, and of the master, during and between broadcasts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from relays_here import CHUNK, chain_over, manifest_of, new_root, put, until, weights

from benchmarks.relay_processes import RelayProcess
from infra.store.weight_store import WeightStore
from infra.transport.weight_pusher import WeightPusher
from schemas.records import RelayChain, WeightVersion

RATE = 4e6


class Tier:
    """Relay processes 0, 1, 2 and a trainer's courier over the store of the first."""

    def __init__(self) -> None:
        with ThreadPoolExecutor(3) as at_once:
            self.relays = list(at_once.map(lambda relay: RelayProcess(new_root(), relay, RATE), range(3)))
        self.store = WeightStore(self.relays[0].root, 4)
        self.courier = WeightPusher(self.store, "r", host="here")

    def tell(self, record: RelayChain | WeightVersion, *but: int) -> None:
        for relay in self.relays:
            if relay.relay not in but:
                relay.tell(record)
        if isinstance(record, RelayChain):
            self.courier.obey(record)
        else:
            self.courier.announce(record)

    def stand(self, *order: int) -> None:
        left = set(range(3)) - set(order)
        self.tell(chain_over([self.relays[each].link for each in order]), *left)

    def close(self) -> None:
        self.courier.close()
        self.store.close()
        for relay in self.relays:
            relay.close()
            shutil.rmtree(relay.root, ignore_errors=True)


@pytest.fixture
def tier() -> Iterator[Tier]:
    made = Tier()
    yield made
    made.close()


def test_the_successor_of_a_killed_relay_goes_on_with_the_missing_chunks(tier: Tier) -> None:
    data = weights(1, 2.0)
    manifest = manifest_of("1.1", data)
    put(tier.store, manifest, data)
    tier.stand(0, 1, 2)
    tier.tell(manifest)
    last = tier.relays[2]
    until(lambda: last.said["arrived"] > 4 * CHUNK)
    tier.relays[1].kill()
    until(lambda: last.has("1.1"))
    assert (last.root / "1.1.safetensors").read_bytes() == data.tobytes()
    until(lambda: last.said["lost"] >= 1)
    assert last.said["received"] <= len(data) + 2 * CHUNK


def test_a_master_killed_in_a_broadcast_is_followed_by_another_to_which_the_trainer_pushes(tier: Tier) -> None:
    data = weights(2, 2.0)
    manifest = manifest_of("1.1", data)
    put(tier.store, manifest, data)
    tier.stand(0, 1, 2)
    tier.tell(manifest)
    middle = tier.relays[1]
    until(lambda: middle.said["arrived"] > 4 * CHUNK)
    tier.relays[0].kill()
    until(lambda: middle.said["lost"] >= 1)
    tier.stand(1, 2)  # as placement does, once it misses the heartbeats
    for relay in tier.relays[1:]:
        until(lambda relay=relay: relay.has("1.1"))
        assert (relay.root / "1.1.safetensors").read_bytes() == data.tobytes()
        assert relay.said["received"] <= len(data) + 4 * CHUNK  # what had arrived stayed
    assert tier.courier.delivered(manifest.version, 10)


def test_a_master_killed_between_broadcasts(tier: Tier) -> None:
    old, new = weights(3, 0.5), weights(4, 0.5)
    first, second = manifest_of("1.1", old), manifest_of("1.2", new)
    put(tier.store, first, old)
    tier.stand(0, 1, 2)
    tier.tell(first)
    until(lambda: all(relay.has("1.1") for relay in tier.relays[1:]))
    tier.relays[0].kill()
    tier.stand(1, 2)
    put(tier.store, second, new)
    tier.tell(second, 0)
    until(lambda: all(relay.has("1.2") for relay in tier.relays[1:]))


def test_one_that_was_killed_comes_back_to_the_newest_and_leaves_no_litter(tier: Tier) -> None:
    old, new = weights(5, 2.0), weights(6, 0.5)
    first, second = manifest_of("1.1", old), manifest_of("1.2", new)
    put(tier.store, first, old)
    tier.stand(0, 1, 2)
    tier.tell(first)
    last = tier.relays[2]
    until(lambda: last.said["arrived"] > 2 * CHUNK)
    last.close()
    assert list(last.root.glob("[0-9]*.partial"))
    put(tier.store, second, new)
    tier.relays[2] = back = RelayProcess(last.root, 2, RATE)
    tier.stand(0, 1, 2)
    tier.tell(first)
    tier.tell(second)
    until(lambda: back.has("1.2"))
    assert not list(back.root.glob("[0-9]*.partial"))
