"""The trainer's machine: its relay may write while the trainer publishes, and the weight pusher may be rejected."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from relays_here import (
    TOKEN,
    Machine,
    chain_over,
    configure,
    elements_of,
    held,
    machines,
    manifest_of,
    specs,
    store_version,
    until,
    weights,
)

from infra.store.errors import StoreBusy
from infra.store.incoming_version import IncomingVersion, Seal
from infra.store.ownership import remove_store
from infra.store.publisher import Publisher
from infra.store.weight_store import WeightStore
from infra.transport import weight_pusher
from infra.transport.weight_pusher import WeightPusher
from operators.trainer.publishing import Publishing, PublishSettings
from schemas.records import PolicyVersion, WeightVersion

ARRAY = {"w": np.arange(8, dtype=np.uint16)}
HOW = {"step": 1, "batch_offsets": (), "trajectories_trained": 0}


@contextmanager
def publisher_while_the_relay_writes() -> Iterator[tuple[Publisher, Machine, list[WeightVersion], ExitStack]]:
    """A publisher on the machine to which version 1.1 is arriving, that machine, the manifests it publishes, and what
    holds the version until it is closed."""
    data, manifests = weights(1), list[WeightVersion]()
    manifest = manifest_of("1.1", data)
    with machines(2) as relays, ExitStack() as holding:
        store_version(relays[0].store, manifest, data)
        holding.enter_context(held(relays[1].node.receiving))
        configure(relays, manifest)
        until(relays[1].node.arriving)
        with WeightStore(relays[1].store.root) as trainer_store:
            yield Publisher(trainer_store, manifests.append, specs(8)), relays[1], manifests, holding


def test_publisher_waits_while_the_relay_writes() -> None:
    with publisher_while_the_relay_writes() as (publisher, machine, _, holding):
        threading.Timer(0.5, holding.close).start()
        publisher.publish(ARRAY, PolicyVersion(2, 1), batches=(1,), **HOW)
        publisher.close()
        assert machine.has("1.1")
        assert machine.has("2.1")


def test_publisher_restores_a_version_that_no_relay_has() -> None:
    data = weights(1)
    manifest = manifest_of("1.1", data)
    tensor = data[-2 * elements_of(data) :].view(np.uint16)
    with machines(2) as relays:
        configure(relays, manifest_of("1.0", weights(0)), manifest)
        until(relays[0].node.arriving)
        with WeightStore(relays[0].store.root) as trainer_store:
            publisher = Publisher(trainer_store, lambda manifest: None, manifest.tensors)
            assert publisher.restore_version({"w": tensor}, manifest)
            publisher.close()
        until(lambda: relays[1].has("1.1"))
        assert relays[1].bytes_of("1.1") == data.tobytes()


def test_publish_raises_while_the_relay_writes_then_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.store.publisher.WRITER_WAIT_S", 0.0)
    with publisher_while_the_relay_writes() as (publisher, machine, manifests, holding):
        with pytest.raises(StoreBusy):
            publisher.publish(ARRAY, PolicyVersion(2, 1), batches=(1,), **HOW)
        holding.close()
        until(lambda: machine.has("1.1"))
        until(lambda: _published(publisher))
        publisher.close()
        assert machine.has("2.1")
    (manifest_of_second,) = manifests
    assert manifest_of_second.batches == (1, 2)  # the batches of the first attempt included


def _published(publisher: Publisher) -> bool:
    try:
        return publisher.publish(ARRAY, PolicyVersion(2, 1), batches=(2,), **HOW)
    except StoreBusy:  # the relay has the version and is about to release the store
        return False


def test_version_of_an_ended_start_is_delivered() -> None:
    """The start before ended after it had published the version, and before the master could take it."""
    data = weights(2)
    manifest = manifest_of("1.1", data)
    producer: Any = SimpleNamespace(close=lambda timeout_s: None)
    with (
        machines(1) as (master,),
        WeightStore(master.store.root.with_name("other-" + master.store.root.name)) as store,
    ):
        store_version(store, manifest, data)
        settings = PublishSettings(TOKEN, deltas=False)
        publishing = Publishing(
            store, lambda: producer, "r", manifest.tensors, manifest.version, settings, host="elsewhere"
        )
        try:
            publishing.set_chain(chain_over([master.link]))
            configure([master], manifest)
            publishing.restore_version({}, manifest)
            until(lambda: master.has("1.1"))
        finally:
            publishing.close()
            remove_store(store.root, in_use=True)


@pytest.fixture
def long_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The master returns an offer that is not used after two minutes."""
    monkeypatch.setattr(weight_pusher, "OFFER_TIMEOUT_S", 120.0)


@contextmanager
def pusher_to(master: Machine, token: str = TOKEN) -> Iterator[tuple[WeightPusher, WeightStore]]:
    """A pusher on another machine than `master`, and its store, which keeps one version."""
    with WeightStore(master.store.root.with_name("other-" + master.store.root.name), keep=1) as store:
        pusher = WeightPusher(store, "r", token, host="elsewhere")
        try:
            pusher.set_chain(chain_over([master.link]))
            yield pusher, store
        finally:
            pusher.close()
            remove_store(store.root, in_use=True)


def publish(pusher: WeightPusher, store: WeightStore, *masters: Machine, number: int = 1) -> WeightVersion:
    """Store version 1.`number`, as a trainer does, and announce it; its manifest, which `masters` have, too."""
    data = weights(number)
    manifest = manifest_of(f"1.{number}", data)
    store_version(store, manifest, data)
    store.evict()
    configure(masters, manifest)
    pusher.announce(manifest)
    return manifest


def test_pusher_logs_a_rejection_once_and_retries(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with machines(1) as (master,), pusher_to(master, "another-token-entirely") as (pusher, store):
        manifest = publish(pusher, store)
        until(lambda: "did not accept" in caplog.text)
        assert not pusher.wait_delivered(manifest.version, 1.2)  # another attempt
    warnings = [record.getMessage() for record in caplog.records if "did not accept version 1.1" in record.getMessage()]
    assert len(warnings) == 1
    assert "the token is not that of this run" in warnings[0]


def test_pusher_keeps_no_evicted_version_mapped() -> None:
    with machines(1) as (master,), pusher_to(master) as (pusher, store):
        for number in (1, 2, 3):
            assert pusher.wait_delivered(publish(pusher, store, master, number=number).version, 60)
        maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(store.root) in line]
        assert [line for line in maps if line.endswith("(deleted)")] == []


def test_pusher_logs_no_warning_for_a_delivery(caplog: pytest.LogCaptureFixture) -> None:
    with machines(1) as (master,), pusher_to(master) as (pusher, store):
        assert pusher.wait_delivered(publish(pusher, store, master).version, 60)
    assert "did not accept" not in caplog.text


@pytest.mark.usefixtures("long_offers")
def test_offer_is_refused_once_its_version_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer offers it again while the master hashes what it has fetched."""
    seal = IncomingVersion.seal

    def slowly(self: IncomingVersion, expected: str | None = None) -> Seal:
        time.sleep(0.8 if expected else 0.0)
        return seal(self, expected)

    monkeypatch.setattr(IncomingVersion, "seal", slowly)
    with machines(1) as (master,), pusher_to(master) as (pusher, store):
        assert pusher.wait_delivered(publish(pusher, store, master).version, 60)


def test_master_that_lost_its_memory_gets_the_version_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is back at the same address, so its chain is the same."""
    monkeypatch.setattr(weight_pusher, "OFFER_AGAIN_S", 0.2)
    with machines(1) as (master,), pusher_to(master) as (pusher, store):
        manifest = publish(pusher, store, master)
        assert pusher.wait_delivered(manifest.version, 60)
        master.close()
        with machines(1, port=int(master.node.address.rpartition(":")[2])) as (again,):
            configure([again], manifest)
            until(lambda: again.has("1.1"))
            assert pusher.wait_delivered(manifest.version, 60)


@pytest.mark.usefixtures("long_offers")
def test_close_ends_an_offer_that_is_not_used() -> None:
    with machines(1) as (master,), pusher_to(master) as (pusher, store):
        publish(pusher, store)  # the master has no manifest
        until(lambda: master.node._pushes._offers)
        before = time.monotonic()
        pusher.close()
        assert time.monotonic() - before < weight_pusher.OFFER_TIMEOUT_S / 2


@pytest.mark.usefixtures("long_offers")
def test_a_newer_version_ends_an_offer_that_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise it would wait until the master returns the older one."""
    with machines(1) as (master,), pusher_to(master) as (pusher, store):
        publish(pusher, store)  # the master has no manifest of it, and will not fetch it
        until(lambda: master.node._pushes._offers)
        assert pusher.wait_delivered(publish(pusher, store, master, number=2).version, 60)
    assert "did not accept" not in caplog.text


@pytest.mark.usefixtures("long_offers")
def test_another_master_ends_an_offer_that_is_not_used() -> None:
    with machines(1) as (master,), machines(1, first=1) as (other,), pusher_to(master) as (pusher, store):
        manifest = publish(pusher, store)
        until(lambda: master.node._pushes._offers)
        configure([other], manifest)
        pusher.set_chain(chain_over([other.link]))
        assert pusher.wait_delivered(manifest.version, 60)


def test_a_newer_version_does_not_end_an_offer_in_use() -> None:
    """The master would fetch again what it has."""
    with machines(1) as (master,), pusher_to(master) as (pusher, store):
        with held(master.node.receiving):
            publish(pusher, store, master)
            until(lambda: pusher._connection is not None and pusher._unused_offer is None)
            pusher.announce(manifest_of("1.2", weights(2)))
        until(lambda: master.has("1.1"))
        assert master.node.counts.lost == 0
