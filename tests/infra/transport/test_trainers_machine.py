"""The trainer's machine: its relay may be fetching when the trainer publishes, and its courier may be refused."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from relays_here import chain_over, elements_of, machines, manifest_of, put, specs, tell, until, weights

from infra.store.errors import StoreBusy
from infra.store.publisher import Publisher
from infra.store.weight_store import WeightStore
from infra.transport.weight_pusher import WeightPusher
from schemas.records import PolicyVersion, WeightVersion

HOW = {"step": 1, "batch_offsets": (), "trajectories_trained": 0}


def test_a_trainer_that_starts_while_the_machines_relay_fetches_waits_for_its_turn() -> None:
    data = weights(1)
    manifest = manifest_of("1.1", data)
    manifests: list[WeightVersion] = []
    with machines(2, rate=2e6) as relays:
        put(relays[0].store, manifest, data)
        tell(relays, manifest)
        until(relays[1].node.arriving)
        with WeightStore(relays[1].store.root) as trainers:
            publisher = Publisher(trainers, manifests.append, specs(8))
            publisher.publish({"w": np.arange(8, dtype=np.uint16)}, PolicyVersion(2, 1), batches=(1,), **HOW)
            publisher.close()
        assert relays[1].has("1.1")
        assert relays[1].has("2.1")


def test_a_trainer_puts_back_what_the_machines_relay_looks_for_and_nobody_has() -> None:
    data = weights(1)
    manifest = manifest_of("1.1", data)
    tensor = data[-2 * elements_of(data) :].view(np.uint16)
    with machines(2) as relays:
        tell(relays, manifest_of("1.0", weights(0)), manifest)
        until(relays[0].node.arriving)
        with WeightStore(relays[0].store.root) as trainers:
            publisher = Publisher(trainers, lambda manifest: None, manifest.tensors)
            assert publisher.put_back({"w": tensor}, manifest)
            publisher.close()
        until(lambda: relays[1].has("1.1"))
        assert relays[1].bytes_of("1.1") == data.tobytes()


def test_a_publish_while_the_machines_relay_fetches_is_told_and_succeeds_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("infra.store.publisher.TURN_S", 0.0)
    data = weights(1)
    manifest = manifest_of("1.1", data)
    array = {"w": np.arange(8, dtype=np.uint16)}
    manifests: list[WeightVersion] = []
    with machines(2, rate=2e6) as relays:
        put(relays[0].store, manifest, data)
        tell(relays, manifest)
        until(relays[1].node.arriving)
        with WeightStore(relays[1].store.root) as trainers:
            publisher = Publisher(trainers, manifests.append, specs(8))
            with pytest.raises(StoreBusy):
                publisher.publish(array, PolicyVersion(2, 1), batches=(1,), **HOW)
            until(lambda: relays[1].has("1.1"))
            until(lambda: _out(publisher, array))
            publisher.close()
        assert relays[1].has("2.1")
    (told,) = manifests
    assert told.batches == (1, 2)  # what the first attempt would have told


def _out(publisher: Publisher, array: dict[str, np.ndarray]) -> bool:
    try:
        return publisher.publish(array, PolicyVersion(2, 1), batches=(2,), **HOW)
    except StoreBusy:  # the relay has it, and is about to let go of the store
        return False


def test_a_courier_that_is_refused_says_why_once_and_goes_on_offering(caplog: pytest.LogCaptureFixture) -> None:
    data = weights(2)
    manifest = manifest_of("1.1", data)
    caplog.set_level(logging.WARNING)
    with (
        machines(1, token="secret") as (master,),
        WeightStore(master.store.root.with_name("other-" + master.store.root.name)) as store,
    ):
        courier = WeightPusher(store, "r", token="wrong", host="elsewhere")
        try:
            put(store, manifest, data)
            courier.obey(chain_over([master.link]))
            courier.announce(manifest)
            assert not courier.delivered(manifest.version, 1.2)  # two attempts
        finally:
            courier.close()
            store.destroy()
    said = [record.getMessage() for record in caplog.records if "does not take version 1.1" in record.getMessage()]
    assert len(said) == 1
    assert "the token is not that of this run" in said[0]
