"""`kill -9` of real relay processes: of a relay inside the chain and of the master, during and between broadcasts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from relays_here import CHUNK, chain_over, manifest_of, new_root, store_version, until, weights

from benchmarks.relay_processes import TOKEN, RelayProcess
from infra.store.weight_store import WeightStore
from infra.transport.weight_pusher import WeightPusher
from schemas.records import RelayChain, WeightVersion

RATE = 5e5


class Tier:
    """Relay processes 0, 1, 2, and a trainer's weight pusher over the store of the first."""

    def __init__(self) -> None:
        with ThreadPoolExecutor(3) as at_once:
            self.relays = list(at_once.map(lambda relay: RelayProcess(new_root(), relay, RATE), range(3)))
        self.store = WeightStore(self.relays[0].root, 4)
        self.pusher = WeightPusher(self.store, "r", TOKEN, host="here")

    def send(self, record: RelayChain | WeightVersion, *excluded: int) -> None:
        for relay in self.relays:
            if relay.relay not in excluded:
                relay.send(record)
        if isinstance(record, RelayChain):
            self.pusher.set_chain(record)
        else:
            self.pusher.announce(record)

    def set_order(self, *order: int) -> None:
        excluded = set(range(3)) - set(order)
        self.send(chain_over([self.relays[each].link for each in order]), *excluded)

    def close(self) -> None:
        self.pusher.close()
        self.store.close()
        for relay in self.relays:
            relay.close()
            shutil.rmtree(relay.root, ignore_errors=True)


@pytest.fixture
def tier() -> Iterator[Tier]:
    opened = Tier()
    yield opened
    opened.close()


def send_to_three(tier: Tier, seed: int) -> tuple[np.ndarray, WeightVersion]:
    """Send version 1.1 to three relays; its data and manifest."""
    data = weights(seed, 4.0)
    manifest = manifest_of("1.1", data)
    store_version(tier.store, manifest, data)
    tier.set_order(0, 1, 2)
    tier.send(manifest, 2)
    until(lambda: tier.relays[1].status["arrived"] > 0)  # else the last relay could take all from the first
    tier.relays[2].send(manifest)
    return data, manifest


def test_successor_of_a_killed_relay_fetches_missing_chunks(tier: Tier) -> None:
    data, _ = send_to_three(tier, 1)
    last = tier.relays[2]
    until(lambda: last.status["arrived"] > 4 * CHUNK)
    tier.relays[1].kill()
    until(lambda: last.has("1.1"))
    assert (last.root / "1.1.safetensors").read_bytes() == data.tobytes()
    until(lambda: last.status["lost"] >= 1)
    assert last.status["received"] <= len(data) + 2 * CHUNK


def test_trainer_pushes_to_the_new_master_after_a_kill(tier: Tier) -> None:
    data, manifest = send_to_three(tier, 2)
    middle = tier.relays[1]
    until(lambda: middle.status["arrived"] > 4 * CHUNK)
    tier.relays[0].kill()
    until(lambda: middle.status["lost"] >= 1)
    tier.set_order(1, 2)  # as placement does once heartbeats are missing
    for relay in tier.relays[1:]:
        until(lambda relay=relay: relay.has("1.1"))
        assert (relay.root / "1.1.safetensors").read_bytes() == data.tobytes()
        assert relay.status["received"] <= len(data) + 4 * CHUNK  # chunks that had arrived were kept
    assert tier.pusher.wait_delivered(manifest.version, 60)


def test_new_master_serves_the_next_version_after_a_kill(tier: Tier) -> None:
    old, new = weights(3, 0.5), weights(4, 0.5)
    first, second = manifest_of("1.1", old), manifest_of("1.2", new)
    store_version(tier.store, first, old)
    tier.set_order(0, 1, 2)
    tier.send(first)
    until(lambda: all(relay.has("1.1") for relay in tier.relays[1:]))
    tier.relays[0].kill()
    tier.set_order(1, 2)
    store_version(tier.store, second, new)
    tier.send(second, 0)
    until(lambda: all(relay.has("1.2") for relay in tier.relays[1:]))


def test_killed_relay_restarts_without_partial_files(tier: Tier) -> None:
    old, new = weights(5, 4.0), weights(6, 0.5)
    first, second = manifest_of("1.1", old), manifest_of("1.2", new)
    store_version(tier.store, first, old)
    tier.set_order(0, 1, 2)
    tier.send(first)
    last = tier.relays[2]
    until(lambda: last.status["arrived"] > 2 * CHUNK)
    last.close()
    assert list(last.root.glob("[0-9]*.partial"))
    store_version(tier.store, second, new)
    tier.relays[2] = back = RelayProcess(last.root, 2, RATE)
    tier.set_order(0, 1, 2)
    tier.send(first)
    tier.send(second)
    until(lambda: back.has("1.2"))
    assert not list(back.root.glob("[0-9]*.partial"))
