"""The trainer's machine: its relay may write while the trainer publishes, and the weight pusher may be rejected."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
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
    machines,
    manifest_of,
    specs,
    store_version,
    until,
    weights,
)

from infra.store.errors import StoreBusy
from infra.store.ownership import remove_store
from infra.store.publisher import Publisher
from infra.store.weight_store import WeightStore
from infra.transport.weight_pusher import WeightPusher
from operators.trainer.publishing import Publishing, PublishSettings
from schemas.records import PolicyVersion, WeightVersion

ARRAY = {"w": np.arange(8, dtype=np.uint16)}
HOW = {"step": 1, "batch_offsets": (), "trajectories_trained": 0}


@contextmanager
def publisher_while_the_relay_writes() -> Iterator[tuple[Publisher, Machine, list[WeightVersion]]]:
    """A publisher on the machine to which version 1.1 is arriving, that machine, and the manifests it publishes."""
    data, manifests = weights(1), list[WeightVersion]()
    manifest = manifest_of("1.1", data)
    with machines(2, rate=2e6) as relays:
        store_version(relays[0].store, manifest, data)
        configure(relays, manifest)
        until(relays[1].node.arriving)
        with WeightStore(relays[1].store.root) as trainer_store:
            yield Publisher(trainer_store, manifests.append, specs(8)), relays[1], manifests


def test_publisher_waits_while_the_relay_writes() -> None:
    with publisher_while_the_relay_writes() as (publisher, machine, _):
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
    with publisher_while_the_relay_writes() as (publisher, machine, manifests):
        with pytest.raises(StoreBusy):
            publisher.publish(ARRAY, PolicyVersion(2, 1), batches=(1,), **HOW)
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


def test_pusher_logs_a_rejection_once_and_retries(caplog: pytest.LogCaptureFixture) -> None:
    data = weights(2)
    manifest = manifest_of("1.1", data)
    caplog.set_level(logging.WARNING)
    with (
        machines(1) as (master,),
        WeightStore(master.store.root.with_name("other-" + master.store.root.name)) as store,
    ):
        pusher = WeightPusher(store, "r", token="another-token-entirely", host="elsewhere")
        try:
            store_version(store, manifest, data)
            pusher.set_chain(chain_over([master.link]))
            pusher.announce(manifest)
            assert not pusher.wait_delivered(manifest.version, 1.2)  # two attempts
        finally:
            pusher.close()
            store.close()
            remove_store(store.root, in_use=True)
    warnings = [record.getMessage() for record in caplog.records if "did not accept version 1.1" in record.getMessage()]
    assert len(warnings) == 1
    assert "the token is not that of this run" in warnings[0]
