"""The relay of one machine, list in, list out: manifests and ticks in, dead letters and what heartbeats say out."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from record_factories import status, version

from infra.certificates import write_relay_files
from infra.kafka.properties import ClientProperties
from infra.store.arriving import Seal
from infra.store.weight_store import WeightStore
from infra.transport.relay_node import Endpoint, RelayNode
from infra.transport.tls import Tls
from operators.io.elements import Output, PartitionKey, Polled, ReceivedRecord
from operators.relay.config import RelayConfig
from operators.relay.relay import RelayFolder, RelayStep, contradiction, resume_from, to_forget
from schemas.codec import decode, encode
from schemas.records import DeadLetter, Metric, PolicyVersion, RelayChain, RelayLink, RelayStatus, WeightVersion
from schemas.topics import DEAD_LETTERS

DATA = b"weights"
PLACE = PartitionKey("relay", 0)


class Relay:
    """A relay with hands on its clock; `at` is the next offset of the relay topic."""

    def __init__(self, root: Path, state: dict[str, Any] | None = None, at: int = 0, **changes: Any) -> None:
        self.at = at
        config = RelayConfig(str(root), relay=3, **changes)
        store = WeightStore(root, config.keep_versions)
        node = RelayNode(store, "run", config.relay, config.door(), config.link(), config.link())
        self.folder = RelayFolder(config, store, node, state or {}, wall_s=lambda: 1.5)

    def sees(self, *records: Any, caught_up: bool = True) -> Sequence[Output]:
        received = tuple(ReceivedRecord("relay", 0, self.at + n, record) for n, record in enumerate(records))
        self.at += len(records)
        return self.folder.fold(Polled("group", 1, received, (), {PLACE: self.at}, caught_up))

    def held(self, *records: Any) -> tuple[str, ...]:
        """The versions of its heartbeat once it has seen `records`."""
        self.sees(*records)
        status = self.folder.status()
        assert status is not None
        return status.versions

    def checkpoint(self) -> tuple[int, Any]:
        checkpoint = self.folder.checkpoint({PLACE: self.at})
        assert checkpoint.ledger_from is None
        return checkpoint.low_water[PLACE], checkpoint.state


@pytest.fixture
def store(tmp_path: Path) -> Iterator[WeightStore]:
    """The machine's store, to which the tests write as a trainer does."""
    with WeightStore(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def relay(store: WeightStore) -> Iterator[Relay]:
    opened = Relay(store.root, keep_versions=2)
    yield opened
    opened.folder.close()


def manifest(version: str, data: bytes = DATA, **changes: Any) -> WeightVersion:
    plain = WeightVersion(
        version=PolicyVersion.parse(version),
        parent=None,
        step=1,
        file=f"{version}.safetensors",
        bytes=len(data),
        blake3=blake3(data).hexdigest(),
        tensors=(),
        batches=(1,),
        batch_offsets=(1,),
        trajectories_trained=1,
        final=False,
        created_at=1,
    )
    return replace(plain, **changes)


def add(store: WeightStore, version: str, data: bytes = DATA) -> WeightVersion:
    """Put a version into the store; the manifest that is true of it."""
    coming = store.begin(PolicyVersion.parse(version), len(data))
    coming.view[:] = data
    coming.seal()
    return manifest(version, data)


def letters(outputs: Sequence[Output]) -> list[DeadLetter]:
    return [output.record for output in outputs if isinstance(output.record, DeadLetter)]


def test_a_version_is_held_once_its_manifest_is_true(relay: Relay, store: WeightStore) -> None:
    told = add(store, "1.1")
    assert relay.held() == ()  # complete, but nobody has announced it
    assert relay.held(told) == ("1.1",)
    heartbeat = relay.folder.status()
    assert heartbeat is not None
    assert heartbeat.address.startswith("127.0.0.1:")
    said = RelayStatus(3, ("1.1",), len(DATA), os.uname().nodename, os.getpid(), 1500, store=str(store.root))
    assert heartbeat == replace(said, address=heartbeat.address)
    encode(heartbeat)


def test_relay_says_nothing_of_itself_before_it_has_read_all_manifests(relay: Relay, store: WeightStore) -> None:
    told = add(store, "1.1")
    assert relay.folder.status() is None
    relay.sees(caught_up=False)
    assert relay.folder.status() is None  # to say that it holds nothing would cost it the master's place
    assert relay.held(told) == ("1.1",)


def test_a_manifest_may_come_before_its_bytes(relay: Relay, store: WeightStore) -> None:
    assert relay.held(manifest("1.1")) == ()
    add(store, "1.1")
    assert relay.held() == ("1.1",)


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ({"bytes": 8}, "the manifest of version 1.1 claims bytes 8 where the store has 7"),
        ({"blake3": "00"}, f"claims blake3 '00' where the store has '{blake3(DATA).hexdigest()}'"),
        ({"file": "../../etc/passwd"}, "claims file '../../etc/passwd' where the store has '1.1.safetensors'"),
        ({"bytes": 0, "blake3": "ff"}, "claims bytes 0 where the store has 7, blake3 'ff' where"),
    ],
)
@pytest.mark.parametrize("bytes_first", [True, False])
def test_a_manifest_that_lies_is_a_dead_letter(
    relay: Relay, store: WeightStore, lie: dict[str, Any], reason: str, bytes_first: bool
) -> None:
    relay.at = 17
    if bytes_first:
        add(store, "1.1")
        outputs = relay.sees(manifest("1.1", **lie))
    else:
        assert letters(relay.sees(manifest("1.1", **lie))) == []
        add(store, "1.1")
        outputs = relay.sees()
    (letter,) = letters(outputs)
    assert reason in letter.reason
    assert (letter.step, letter.topic, letter.partition, letter.offset, letter.failed_at) == (
        "relay",
        "relay",
        0,
        17,
        1500,
    )
    assert decode(letter.payload, encode(manifest("1.1"))[1]) == [manifest("1.1", **lie)]
    assert [output.topic for output in outputs if output.record is letter] == [DEAD_LETTERS]
    assert relay.held(manifest("1.1")) == ("1.1",)  # the truth may still come


def test_a_later_lie_does_not_undo_the_truth(relay: Relay, store: WeightStore) -> None:
    told = add(store, "1.1")
    assert relay.held(told) == ("1.1",)
    outputs = relay.sees(told, manifest("1.1", blake3="00"))
    assert (len(letters(outputs)), relay.held()) == (1, ("1.1",))


def test_of_two_claims_for_absent_bytes_the_true_one_counts(relay: Relay, store: WeightStore) -> None:
    relay.sees(manifest("1.1"), manifest("1.1", blake3="00"))
    add(store, "1.1")
    outputs = relay.sees()
    assert ([letter.offset for letter in letters(outputs)], relay.held()) == ([1], ("1.1",))


def test_a_record_of_another_kind_is_a_dead_letter(relay: Relay) -> None:
    (letter,) = letters(relay.sees(Metric("m", 1, {}, 1)))
    assert letter.reason == "a relay cannot read a Metric"


def test_old_versions_are_evicted_and_pinned_ones_stay(relay: Relay, store: WeightStore) -> None:
    told = [add(store, f"1.{number}") for number in range(1, 6)]
    with store.pin(PolicyVersion(1, 2)):
        assert relay.held(*told) == ("1.5", "1.4", "1.2")
    assert relay.held() == ("1.5", "1.4")
    assert store.versions() == [PolicyVersion(1, 5), PolicyVersion(1, 4)]


def test_numbers_may_go_back_with_a_new_epoch(relay: Relay, store: WeightStore) -> None:
    relay.sees(add(store, "1.8"), add(store, "1.9"))
    assert relay.held(add(store, "2.3")) == ("2.3", "1.9")


def test_a_restart_reads_again_what_it_needs_and_repeats_no_dead_letter(relay: Relay, store: WeightStore) -> None:
    records = [manifest("1.0"), add(store, "1.1"), add(store, "1.2"), manifest("1.2", blake3="00"), manifest("1.3")]
    outputs = relay.sees(*records)
    assert (relay.held(), len(letters(outputs))) == (("1.2", "1.1"), 1)
    low_water, state = relay.checkpoint()
    assert (low_water, state) == (1, {"refused": [3]})  # 1.0 would be evicted if it came
    add(store, "1.3")
    relay.sees(manifest("1.4"), manifest("1.5"))
    low_water, state = relay.checkpoint()
    assert (low_water, state) == (2, {"refused": [3]})
    for start in (low_water, 0):
        again = Relay(store.root, state, at=start, keep_versions=2)
        outputs = again.sees(*[*records, manifest("1.4"), manifest("1.5")][start:])
        assert (again.held(), letters(outputs)) == (("1.3", "1.2"), [])
        again.folder.close()


def test_what_is_remembered_is_bounded(relay: Relay, store: WeightStore) -> None:
    add(store, "1.1")
    for number in range(200):
        relay.sees(manifest("1.1", blake3=f"{number:064x}"), manifest(f"2.{number}"))
    low_water, state = relay.checkpoint()
    assert len(state["refused"]) == 64
    assert state["refused"][-1] == 398
    assert low_water == 397  # the manifests of 2.198 and 2.199, which may come
    assert relay.folder.busy() is False
    relay.sees(*(manifest("3.0", blake3=f"{number:064x}") for number in range(20)))
    add(store, "3.0")
    assert [letter.offset for letter in letters(relay.sees())] == list(range(412, 420))


@pytest.mark.parametrize(
    ("waiting", "held", "live", "keep", "forgotten"),
    [
        ("1.1 1.2 2.0", "", "", 2, "1.1"),
        ("1.1", "", "", 1, ""),
        ("1.1", "1.2", "", 1, "1.1"),
        ("1.3", "1.2 1.1", "", 1, ""),
        ("1.0 1.2", "1.1 1.3", "", 3, "1.0"),
        ("1.0 1.2", "1.1 1.3", "1.0", 3, ""),  # trajectories still run under it
        ("", "1.1", "", 4, ""),
    ],
)
def test_to_forget(waiting: str, held: str, live: str, keep: int, forgotten: str) -> None:
    named = ([PolicyVersion.parse(version) for version in versions.split()] for versions in (waiting, held, live))
    assert " ".join(map(str, to_forget(*named, keep))) == forgotten


@pytest.mark.parametrize(("position", "needed", "offset"), [(9, [], 9), (9, [4, 7], 4), (0, [], 0)])
def test_resume_from(position: int, needed: list[int], offset: int) -> None:
    assert resume_from(position, needed) == offset


def test_a_true_manifest_contradicts_nothing() -> None:
    told = manifest("1.1")
    assert contradiction(told, Seal(told.version, told.bytes, told.blake3)) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"store": ""}, "store must be a folder"),
        ({"keep_versions": 0}, "keep_versions must be at least 1, not 0"),
        ({"heartbeat_s": 0.0}, "heartbeat_s must be positive, not 0.0"),
        ({"heartbeat_s": float("nan")}, "heartbeat_s must be positive"),
        ({"relay": -1}, "relay must not be negative, not -1"),
        ({"listen": "0.0.0.0"}, "lets strangers in: set token_file"),
        ({"listen": "my-host"}, "lets strangers in: set token_file"),
        ({"port": 65536}, "port must be 0 to 65535"),
        ({"advertise": "host"}, "advertise must be host:port"),
        ({"chunk_bytes": 0}, "chunk_bytes must be 1024 to"),
        ({"max_megabytes_per_s": 0.0}, "max_megabytes_per_s must be positive"),
    ],
)
def test_a_bad_setting_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RelayConfig(**config)


def test_a_folder_that_is_not_settled_is_refused() -> None:
    with pytest.raises(ValueError, match="the store's folder is not settled"):
        RelayStep(RelayConfig(), ClientProperties.at("localhost:1"), "run")


def test_versions_that_replicas_generate_under_are_evicted_last(relay: Relay, store: WeightStore) -> None:
    for number in (1, 2):
        add(store, f"1.{number}")
    store.rest()
    relay.sees(status(0, version(1)), status(1, version(3)))
    assert store.live() == {version(1), version(3)}
    relay.sees(status(0, None), status(1, version(3), state="stopped"))
    relay.sees(status(0, version(2)))
    assert store.live() == {version(2)}


def test_a_lie_found_while_it_arrives_is_a_dead_letter_once(relay: Relay, store: WeightStore) -> None:
    lie = manifest("1.1", chunk_bytes=0)  # no chunks: nothing can be fetched
    relay.sees(lie, RelayChain(1, (RelayLink(3, "", "", ""), RelayLink(4, "", "", "")), (), "chain", 0))
    found: list[DeadLetter] = []
    deadline = time.monotonic() + 10
    while not found and time.monotonic() < deadline:
        found += letters(relay.sees())
        time.sleep(0.01)
    (letter,) = found
    assert "cannot be true: version 1.1 is said to have chunks of 0 bytes" in letter.reason
    assert (letter.offset, letters(relay.sees(lie))) == (0, [])
    assert relay.checkpoint()[1] == {"refused": [0]}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "lets strangers in: set token_file"),
        ({"token_file": "t"}, "sends weights and KV in clear text: set certificate_file and authority_file"),
        ({"token_file": "t", "certificate_file": "c"}, "set both certificate_file and authority_file"),
    ],
)
def test_a_relay_for_other_machines_needs_token_and_tls(fields: dict[str, str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RelayConfig(listen="0.0.0.0", **fields)


def test_tls_files_of_a_relay_are_checked_and_used(tmp_path: Path) -> None:
    token, certificate, authority = map(str, write_relay_files(tmp_path / "it"))
    config = RelayConfig(listen="0.0.0.0", token_file=token, certificate_file=certificate, authority_file=authority)
    assert config.door().tls == Tls(certificate, authority)
    with pytest.raises(ValueError, match="do not serve"):
        replace(config, authority_file=str(tmp_path / "none")).door()


def test_a_token_is_the_first_line_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a-secret-of-relays\nmore\n")
    config = RelayConfig(listen="0.0.0.0", token_file=str(file), clear_text=True)
    assert config.door() == Endpoint("0.0.0.0", token="a-secret-of-relays")
    file.write_text("fifteen-letters\n")
    with pytest.raises(ValueError, match="has 15 characters, at least 16 are needed"):
        config.door()
    file.write_text("\n")
    with pytest.raises(ValueError, match="has no secret in its first line"):
        RelayConfig(token_file=str(file)).token()
    with pytest.raises(ValueError, match="cannot be read"):
        RelayConfig(token_file=str(tmp_path / "none")).token()
