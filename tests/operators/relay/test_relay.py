"""The relay of one machine, as a fold: manifests and ticks in, dead letters and heartbeats out."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from record_factories import status, version
from relay_folds import DATA, Relay, add, letters, manifest, relay, store
from waiting import until

from infra.kafka.properties import ClientProperties
from infra.store.incoming_version import Seal
from infra.store.sealed_objects import sealed_versions
from infra.store.weight_store import WeightStore
from operators.relay import relay as relay_module
from operators.relay.config import RelayConfig
from operators.relay.relay import RelayStep, manifest_mismatch, versions_to_forget
from schemas.codec import decode, encode
from schemas.records import DeadLetter, Metric, PolicyVersion, RelayChain, RelayLink, RelayStatus
from schemas.topics import DEAD_LETTERS

__all__ = ["relay", "store"]
"""Fixtures."""


def test_relay_reports_a_version_once_its_manifest_matches(relay: Relay, store: WeightStore) -> None:
    announced = add(store, "1.1")
    assert relay.held() == ()  # complete, but without a manifest
    assert relay.held(announced) == ("1.1",)
    heartbeat = relay.fold.status()
    assert heartbeat is not None
    assert heartbeat.address.startswith("127.0.0.1:")
    expected = RelayStatus(3, ("1.1",), len(DATA), os.uname().nodename, os.getpid(), 1500, store=str(store.root))
    assert heartbeat == replace(expected, address=heartbeat.address)
    encode(heartbeat)


def test_relay_sends_no_heartbeat_before_reading_all_manifests(relay: Relay, store: WeightStore) -> None:
    announced = add(store, "1.1")
    assert relay.fold.status() is None
    relay.receive(caught_up=False)
    assert relay.fold.status() is None  # a relay that reports no versions loses the role of master
    assert relay.held(announced) == ("1.1",)


def test_relay_accepts_a_manifest_before_its_bytes(relay: Relay, store: WeightStore) -> None:
    assert relay.held(manifest("1.1")) == ()
    add(store, "1.1")
    assert relay.held() == ("1.1",)


@pytest.mark.parametrize(
    ("invalid", "reason"),
    [
        ({"bytes": 8}, "the manifest of version 1.1 declares bytes 8 but the store has 7"),
        ({"blake3": "00"}, f"declares blake3 '00' but the store has '{blake3(DATA).hexdigest()}'"),
        ({"file": "../../etc/passwd"}, "declares file '../../etc/passwd' but the store has '1.1.safetensors'"),
        ({"bytes": 0, "blake3": "ff"}, "declares bytes 0 but the store has 7, blake3 'ff' but"),
    ],
)
@pytest.mark.parametrize("bytes_first", [True, False])
def test_relay_dead_letters_a_manifest_that_does_not_match(
    relay: Relay, store: WeightStore, invalid: dict[str, Any], reason: str, bytes_first: bool
) -> None:
    relay.next_offset = 17
    if bytes_first:
        add(store, "1.1")
        outputs = relay.receive(manifest("1.1", **invalid))
    else:
        assert letters(relay.receive(manifest("1.1", **invalid))) == []
        add(store, "1.1")
        outputs = relay.receive()
    (letter,) = letters(outputs)
    assert reason in letter.reason
    assert (letter.step, letter.topic, letter.partition, letter.offset, letter.failed_at) == (
        "relay",
        "relay",
        0,
        17,
        1500,
    )
    assert decode(letter.payload, encode(manifest("1.1"))[1]) == [manifest("1.1", **invalid)]
    assert [output.topic for output in outputs if output.record is letter] == [DEAD_LETTERS]
    assert relay.held(manifest("1.1")) == ("1.1",)  # the valid manifest may still arrive


def test_relay_reports_a_store_that_is_too_small(relay: Relay, caplog: pytest.LogCaptureFixture) -> None:
    relay.receive(*(manifest(f"1.{number}", bytes=1 << 60) for number in (1, 2)))
    (line,) = [each for each in caplog.messages if "relay.keep_versions" in each]
    assert f"keep_versions = 2 and the version that arrives need {3 << 60}: enlarge it" in line


def test_relay_frees_memory_of_ended_runs_at_new_versions(
    relay: Relay, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAMINAR_MACHINE", "node-1")
    ended = store.root.parent / "laminar-ended"
    WeightStore(ended).close()
    for path in (*ended.iterdir(), ended):
        os.utime(path, (1, 1))
    relay.receive(manifest("1.1"))
    assert ended.exists()  # its start was just now
    monkeypatch.setattr(relay_module, "FREE_EVERY_S", 0.0)
    relay.receive(manifest("1.2"))
    assert not ended.exists()


def test_relay_keeps_a_version_after_an_invalid_manifest(relay: Relay, store: WeightStore) -> None:
    announced = add(store, "1.1")
    assert relay.held(announced) == ("1.1",)
    outputs = relay.receive(announced, manifest("1.1", blake3="00"))
    assert (len(letters(outputs)), relay.held()) == (1, ("1.1",))


def test_relay_uses_the_matching_one_of_two_manifests(relay: Relay, store: WeightStore) -> None:
    relay.receive(manifest("1.1"), manifest("1.1", blake3="00"))
    add(store, "1.1")
    outputs = relay.receive()
    assert ([letter.offset for letter in letters(outputs)], relay.held()) == ([1], ("1.1",))


def test_relay_dead_letters_records_of_other_types(relay: Relay) -> None:
    (letter,) = letters(relay.receive(Metric("m", 1, {}, 1)))
    assert letter.reason == "a relay does not consume Metric records"


def test_relay_evicts_old_versions_but_not_pinned_ones(relay: Relay, store: WeightStore) -> None:
    announced = [add(store, f"1.{number}") for number in range(1, 6)]
    with store.pin(PolicyVersion(1, 2)):
        assert relay.held(*announced) == ("1.5", "1.4", "1.2")
    assert relay.held() == ("1.5", "1.4")
    assert store.versions() == [PolicyVersion(1, 5), PolicyVersion(1, 4)]


def test_relay_accepts_a_new_epoch_with_a_lower_number(relay: Relay, store: WeightStore) -> None:
    relay.receive(add(store, "1.8"), add(store, "1.9"))
    assert relay.held(add(store, "2.3")) == ("2.3", "1.9")


def test_relay_restart_repeats_no_dead_letter(relay: Relay, store: WeightStore) -> None:
    records = [manifest("1.0"), add(store, "1.1"), add(store, "1.2"), manifest("1.2", blake3="00"), manifest("1.3")]
    outputs = relay.receive(*records)
    assert (relay.held(), len(letters(outputs))) == (("1.2", "1.1"), 1)
    low_water, state = relay.checkpoint()
    assert (low_water, state) == (1, {"refused": [3]})  # 1.0 would be evicted on arrival
    add(store, "1.3")
    relay.receive(manifest("1.4"), manifest("1.5"))
    low_water, state = relay.checkpoint()
    assert (low_water, state) == (2, {"refused": [3]})
    for start in (low_water, 0):
        again = Relay(store.root, state, next_offset=start, keep_versions=2)
        outputs = again.receive(*[*records, manifest("1.4"), manifest("1.5")][start:])
        assert (again.held(), letters(outputs)) == (("1.3", "1.2"), [])
        again.fold.close()


def test_relay_state_is_bounded(relay: Relay, store: WeightStore) -> None:
    add(store, "1.1")
    for number in range(200):
        relay.receive(manifest("1.1", blake3=f"{number:064x}"), manifest(f"2.{number}"))
    low_water, state = relay.checkpoint()
    assert len(state["refused"]) == 64
    assert state["refused"][-1] == 398
    assert low_water == 397  # the manifests of 2.198 and 2.199, which may still arrive
    assert relay.fold.busy() is False
    relay.receive(*(manifest("3.0", blake3=f"{number:064x}") for number in range(20)))
    add(store, "3.0")
    assert [letter.offset for letter in letters(relay.receive())] == list(range(412, 420))


@pytest.mark.parametrize(
    ("waiting", "held", "live", "keep", "forgotten"),
    [
        ("1.1 1.2 2.0", "", "", 2, "1.1"),
        ("1.1", "", "", 1, ""),
        ("1.1", "1.2", "", 1, "1.1"),
        ("1.3", "1.2 1.1", "", 1, ""),
        ("1.0 1.2", "1.1 1.3", "", 3, "1.0"),
        ("1.0 1.2", "1.1 1.3", "1.0", 3, ""),  # a live trajectory has this version
        ("", "1.1", "", 4, ""),
    ],
)
def test_versions_to_forget(waiting: str, held: str, live: str, keep: int, forgotten: str) -> None:
    named = ([PolicyVersion.parse(version) for version in versions.split()] for versions in (waiting, held, live))
    assert " ".join(map(str, versions_to_forget(*named, keep))) == forgotten


def test_manifest_mismatch_is_none_for_a_matching_manifest() -> None:
    announced = manifest("1.1")
    assert manifest_mismatch(announced, Seal(announced.version, announced.bytes, announced.blake3)) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"store": ""}, "store must be a fold"),
        ({"keep_versions": 0}, "keep_versions must be at least 1, not 0"),
        ({"heartbeat_s": 0.0}, "heartbeat_s must be positive, not 0.0"),
        ({"heartbeat_s": float("nan")}, "heartbeat_s must be positive"),
        ({"relay": -1}, "relay must be at least 0, not -1"),
        ({"listen": "0.0.0.0"}, "accepts other machines: set"),
        ({"listen": "my-host"}, "accepts other machines: set"),
        ({"port": 65536}, "port must be at most 65535, not 65536"),
        ({"advertise": "host"}, "advertise must be host:port"),
        ({"advertise": "8080"}, "must be host:port, with a port from 1 to 65535, not '8080'"),
        ({"advertise": ":8080"}, "advertise must be host:port"),
        ({"advertise": "host:0"}, "advertise must be host:port"),
        ({"advertise": "host:99999"}, "advertise must be host:port"),
        ({"object_store": "ftp://host/folder"}, "object_store: the scheme of 'ftp'"),
        ({"object_store": "s3://key:secret@bucket/folder"}, "contains a password"),
        ({"object_store_every_s": -1.0}, "object_store_every_s must be at least 0"),
        ({"chunk_bytes": 0}, "chunk_bytes must be at least 1024, not 0"),
        ({"max_megabytes_per_s": 0.0}, "max_megabytes_per_s must be positive"),
    ],
)
def test_relay_config_names_an_invalid_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RelayConfig(**config)


def test_relay_copies_its_newest_version_to_the_disk(store: WeightStore, tmp_path: Path) -> None:
    relay = Relay(store.root, disk_folder=str(tmp_path / "disk"))
    assert relay.held(add(store, "1.1"), add(store, "1.2")) == ("1.2", "1.1")
    until((copy := tmp_path / "disk" / "run" / "relay-3" / "1.2.safetensors").exists)
    relay.fold.close()
    assert copy.read_bytes() == DATA
    assert not copy.with_name("1.1.safetensors").exists()


@pytest.mark.parametrize(("master", "copied"), [(3, True), (0, False)])
def test_master_alone_copies_to_the_object_store(store: WeightStore, tmp_path: Path, master: int, copied: bool) -> None:
    relay = Relay(store.root, object_store=str(tmp_path / "shared"), disk_folder=str(tmp_path / "disk"))
    links = tuple(RelayLink(number, f"127.0.0.1:{number + 1}", "host", "store") for number in (master, 3 - master))
    assert relay.held(RelayChain(1, links, (), "chain", 0), add(store, "1.1")) == ("1.1",)
    shared = tmp_path / "shared" / "run"
    until((tmp_path / "disk" / "run" / "relay-3" / "1.1.safetensors").exists)
    until(lambda: not copied or sealed_versions(shared) == [version(1)])
    relay.fold.close()
    assert shared.exists() == copied


def test_relay_step_raises_for_an_automatic_store() -> None:
    with pytest.raises(ValueError, match="call choose_store_folder"):
        RelayStep(RelayConfig(), ClientProperties.at("localhost:1"), "run")


def test_relay_records_the_versions_of_replicas_as_live(relay: Relay, store: WeightStore) -> None:
    for number in (1, 2):
        add(store, f"1.{number}")
    store.release_writer()
    relay.receive(status(0, version(1)), status(1, version(3)))
    assert store.live_versions() == [version(3), version(1)]
    relay.receive(status(0, None), status(1, version(3), state="stopped"))
    relay.receive(status(0, version(2)))
    assert store.live_versions() == [version(2)]


def test_relay_keeps_needed_versions_before_those_of_replicas(store: WeightStore) -> None:
    relay = Relay(store.root, keep_versions=3)
    manifests = [add(store, f"1.{number}") for number in range(4)]
    store.release_writer()
    chain = RelayChain(1, (), (), "chain", 0, needed=(version(0),))
    relay.receive(status(0, version(1)), chain, *manifests)
    assert store.live_versions() == [version(0), version(1)]
    assert store.versions() == [version(3), version(2), version(0)]
    relay.receive(replace(chain, number=2))
    relay.receive(replace(chain, number=3, needed=()))
    assert store.live_versions() == [version(1)]
    assert store.evict(keep=2) == [version(0)]
    relay.fold.close()


def test_relay_dead_letters_an_unfetchable_manifest_once(relay: Relay, store: WeightStore) -> None:
    invalid = manifest("1.1", chunk_bytes=0)  # without chunks nothing can be fetched
    relay.receive(invalid, RelayChain(1, (RelayLink(3, "", "", ""), RelayLink(4, "", "", "")), (), "chain", 0))
    found: list[DeadLetter] = []
    until(lambda: found.extend(letters(relay.receive())) or found)
    (letter,) = found
    assert "is invalid: version 1.1 is declared with chunks of 0 bytes" in letter.reason
    assert (letter.offset, letters(relay.receive(invalid))) == (0, [])
    assert relay.checkpoint()[1] == {"refused": [0]}
