"""`laminar relays` and the weight bytes of `laminar weights`, with a real broker, store and relay."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from object_store import object_store
from role_writer import write_as_role
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from waiting import until

from infra.files import create_secret, read_secret
from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.note import Note
from infra.kafka.producer import BoundedProducer
from infra.kafka.properties import ClientProperties
from infra.kafka.topic_reader import read_topic
from infra.models.checkpoint_folder import save_folder
from infra.models.demo import build_demo_model
from infra.models.demo_config import DemoModelConfig
from infra.storage import open_storage
from infra.store.disk_tier import DiskTier
from infra.store.names import default_root
from infra.store.object_tier import ObjectTier
from infra.store.ownership import remove_store
from infra.store.weight_store import WeightStore
from infra.transport.endpoint import Endpoint
from infra.transport.relay_node import RelayNode
from operators.trainer.checkpoint import write_checkpoint
from operators.trainer.checkpoint_files import TrainerPosition
from operators.trainer.config import LearnerConfig, LoraConfig
from operators.trainer.learner import Learner
from schemas.codec import encode
from schemas.records import CommitNote, PolicyVersion, RelayChain, RelayLink, RelayStatus, WeightVersion
from schemas.topics import RELAY, RELAY_CHAIN, REPLICAS, RESTORE, group_name

Laminar = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(run_id: str) -> str:
    """The run of a test: no other on this machine has its name, nor its weight store."""
    return f"{run_id}-{os.getpid()}"


@pytest.fixture
def client(broker: Broker, run: str) -> ClientProperties:
    """Of a run whose trainer has started."""
    client = ClientProperties.at(broker.bootstrap_servers)
    make_topics(client, run)
    group = group_name(run, "trainer")
    write_as_role(client, run, RESTORE, [CommitNote(group, Note().encode(), 0)], key=group.encode())
    return client


def make_topics(client: ClientProperties, run: str) -> None:
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(topic.name(run), 1) for topic in (RELAY, RELAY_CHAIN, REPLICAS, RESTORE)])


@pytest.fixture
def laminar(client: ClientProperties, run: str, command: Laminar) -> Laminar:
    return lambda *words: command(*words, "--run", run, "-b", client.bootstrap_servers)


@pytest.fixture
def root(run: str) -> Iterator[Path]:
    """The weight store of this machine."""
    root = default_root(run)
    yield root
    remove_store(root, in_use=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "demo"
    save_folder(*build_demo_model(DemoModelConfig()), folder)
    return folder


@pytest.fixture(scope="module")
def changed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with one element of one tensor changed."""
    folder = tmp_path_factory.mktemp("models") / "changed"
    network = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        next(network.parameters()).view(-1)[7] += 1.0
    network.save_pretrained(folder)
    return folder


def send(client: ClientProperties, run: str, *records: RelayChain | RelayStatus) -> None:
    with BoundedProducer(client) as producer:
        for record in records:
            value, headers = encode(record)
            topic, key = (RELAY_CHAIN, run) if isinstance(record, RelayChain) else (REPLICAS, f"relay-{record.relay}")
            producer.send(topic.name(run), value, key=key.encode(), headers=headers)


def json_of(laminar: Laminar, *words: str) -> object:
    code, out, err = laminar(*words, "--json")
    assert code == 0, err
    return json.loads(out)


def test_weights_publish_verify_diff_and_pull(
    laminar: Laminar, root: Path, model: Path, changed: Path, tmp_path: Path
) -> None:
    assert "no weights yet" in laminar("weights", "verify")[2]
    assert json_of(laminar, "weights", "publish", str(model)) == {"version": "0.1", "store": str(root)}
    code, out, _ = laminar("weights", "publish", str(changed))
    assert (code, "as version 0.2 of run" in " ".join(out.split())) == (0, True)

    rows = json_of(laminar, "weights", "verify", "0.1")
    checks = [row["check"] for row in rows]  # type: ignore[attr-defined]
    assert checks == ["bytes", "blake3", "tensors", "matching chunks"]
    assert all(row["matches"] for row in rows)  # type: ignore[attr-defined]

    rows = json_of(laminar, "weights", "diff", "0.1", "0.2")
    assert [row["changed"] for row in rows if row["changed"]] == [1]  # type: ignore[attr-defined]
    assert "0.000 %" in laminar("weights", "diff", "0.1")[1]

    folder = tmp_path / "out"
    pulled = json_of(laminar, "weights", "pull", "latest", str(folder), "--model", str(model))
    assert pulled["from"] == str(root)  # type: ignore[index]
    network = AutoModelForCausalLM.from_pretrained(folder)
    for name, tensor in load_file(changed / "model.safetensors").items():
        assert torch.equal(network.state_dict()[name], tensor)
    code, _, err = laminar("weights", "pull", "latest", str(folder), "--model", str(model))
    assert (code, "exists already" in err) == (1, True)
    assert "has no config.json" in laminar("weights", "pull", "latest", str(tmp_path / "x"), "--model", "/")[2]
    assert not list(tmp_path.glob(".*.tmp"))

    corrupt(root, PolicyVersion(0, 2))
    code, out, _ = laminar("weights", "verify", "--json")
    assert code == 1
    assert {row["check"] for row in json.loads(out) if not row["matches"]} == {"blake3", "matching chunks"}

    gone = tmp_path / "gone"  # the run has ended, and its store is removed
    for words in (("diff", "0.1", "0.2"), ("verify", "0.1")):
        code, _, err = laminar("weights", *words, "--store", str(gone))
        assert (code, f"there is no weight store {gone}" in err) == (1, True)
    assert not gone.exists()


def test_weights_are_pulled_from_a_copy_on_disk(
    laminar: Laminar, run: str, root: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the run's folder and a relay's copies are left, after the end of a run or a reboot."""
    monkeypatch.chdir(tmp_path)
    version = json_of(laminar, "weights", "publish", str(model))["version"]  # type: ignore[index]
    parsed, copies = PolicyVersion.parse(version), tmp_path / "disk" / run / "relay-0"
    with WeightStore(root) as store, DiskTier(store, copies, 1) as tier:
        tier.keep(parsed)
        until(lambda: tier.copies.versions() == [parsed])
    folder, gone = tmp_path / "runs" / run, tmp_path / "gone"
    folder.mkdir(parents=True)
    settings = f"[run]\nname = '{run}'\n[model]\npath = '{model}'\n"
    (folder / "config.toml").write_text(f"{settings}[relay]\nstore = '{gone}'\ndisk_folder = '{tmp_path}/disk'\n")
    listed = json_of(laminar, "weights", "list")
    assert {row["version"]: row["where"] for row in listed}[version][0] == "disk"  # type: ignore[attr-defined]
    pulled = json_of(laminar, "weights", "pull", version, str(tmp_path / "out"))
    assert pulled["from"] == str(copies)  # type: ignore[index]
    ours, theirs = load_file(model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_weights_are_pulled_from_an_object_store(
    laminar: Laminar, run: str, root: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if this machine has nothing else of them; a damaged copy becomes no folder."""
    monkeypatch.chdir(tmp_path)
    version = json_of(laminar, "weights", "publish", str(model))["version"]  # type: ignore[index]
    folder = tmp_path / "runs" / run
    folder.mkdir(parents=True)
    with object_store() as server, WeightStore(root) as store:
        uri = server.bucket("pulled-weights")
        objects = open_storage(uri) / run
        with ObjectTier(store, objects, 1, 0.0) as tier:
            tier.copy(PolicyVersion.parse(version))
        settings = f"[run]\nname = '{run}'\n[model]\npath = '{model}'\n"
        (folder / "config.toml").write_text(f"{settings}[relay]\nstore = '{tmp_path}/gone'\nobject_store = '{uri}'\n")
        listed = json_of(laminar, "weights", "list")
        assert {row["version"]: row["where"] for row in listed}[version][0] == "object store"  # type: ignore[attr-defined]
        pulled = json_of(laminar, "weights", "pull", version, str(tmp_path / "out"))
        copy = objects / f"{version}.safetensors"
        assert pulled["from"] == str(copy)  # type: ignore[index]
        ours, theirs = load_file(model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        data = copy.read_bytes()
        for damaged, message in ((data[:-1], "ends at byte"), (data[:-1] + b"x", "does not have the blake3")):
            copy.write_bytes(damaged)
            code, _, error = laminar("weights", "pull", version, str(tmp_path / "damaged"))
            text = " ".join(error.split())
            assert (code, f"version {version} is damaged" in text) == (1, True)
            assert message in text
            assert not (tmp_path / "damaged").exists()


def corrupt(root: Path, version: PolicyVersion) -> None:
    """Change a byte of a stored version, as a memory fault would."""
    with WeightStore(root) as store:
        path = store.path(version)
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        (last,) = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def test_weights_publish_rejects_other_models(laminar: Laminar, root: Path, model: Path, tmp_path: Path) -> None:
    laminar("weights", "publish", str(model))
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(3)}, tmp_path / "model.safetensors")
    code, _, err = laminar("weights", "publish", str(tmp_path))
    assert (code, "are not of this run's model" in " ".join(err.split())) == (1, True)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    assert "not a safetensors file" in laminar("weights", "publish", str(tmp_path))[2]
    assert "neither model.safetensors" in " ".join(laminar("weights", "publish", "/")[2].split())


def test_weights_publish_is_refused_before_first_start(
    client: ClientProperties, command: Laminar, run_id: str, model: Path
) -> None:
    """The trainer owns the topic `relay`: its first start would refuse one that holds a version."""
    run = f"{run_id}-unstarted"
    make_topics(client, run)
    code, _, err = command("weights", "publish", str(model), "--run", run, "-b", client.bootstrap_servers)
    assert (code, f"trainer of run {run} has not started yet; publish the weights once" in plain(err)) == (1, True)
    assert not list(read_topic(client, RELAY.name(run)))


def test_weights_pull_downloads_from_relay(
    laminar: Laminar,
    run: str,
    client: ClientProperties,
    root: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    published_version = json_of(laminar, "weights", "publish", str(model))
    version = published_version["version"]  # type: ignore[index]
    empty = tmp_path / "empty"
    words = ("weights", "pull", version, str(tmp_path / "out"), "--model", str(model), "--store", str(empty))
    assert "has no relays" in " ".join(laminar(*words)[2].split())
    secret = tmp_path / "runs" / run / "relay.secret"
    create_secret(secret)
    with WeightStore(root) as store:
        node = RelayNode(store, run, 0, Endpoint(token=read_secret(secret)))
        try:
            send(client, run, RelayChain(1, (RelayLink(0, node.address, "elsewhere", "/"),), (), "chain", 0))
            assert "relays need a token of at least 16" in " ".join(laminar(*words)[2].split())  # it has no config.toml
            (secret.parent / "config.toml").write_text(f"[run]\nname = '{run}'\n")
            assert json_of(laminar, *words)["from"] == "1 relays"  # type: ignore[index]
        finally:
            node.close()
    ours, theirs = load_file(model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    code, _, err = laminar(*words[:3], str(tmp_path / "again"), *words[4:])
    assert (code, "relays delivered version" in " ".join(err.split())) == (1, True)


def test_weights_pull_writes_adapters_of_a_checkpoint(
    laminar: Laminar, run: str, root: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft", reason="the extra `lora` is not installed")
    monkeypatch.chdir(tmp_path)
    published = json_of(laminar, "weights", "publish", str(model))
    assert published["store"] == str(root)  # type: ignore[index]
    version = published["version"]  # type: ignore[index]
    folder, out = tmp_path / "runs" / run, tmp_path / "adapters"
    words = ("weights", "pull", version, str(out), "--adapter")
    assert "--adapter needs the folder of the run" in plain(laminar(*words)[2])
    folder.mkdir(parents=True)
    settings = f"[run]\nname = '{run}'\n[model]\npath = '{model}'\n"
    (folder / "config.toml").write_text(settings)
    assert "trainer.learner.lora.rank is 0" in plain(laminar(*words)[2])
    (folder / "config.toml").write_text(f"{settings}[trainer.learner.lora]\nrank = 4\n")
    assert f"version {version} is in no checkpoint" in plain(laminar(*words)[2])

    learner = Learner(LearnerConfig(lora=LoraConfig(rank=4)), model)
    position = TrainerPosition(PolicyVersion.parse(version), (0,), 0)
    checkpoint = write_checkpoint(folder / "checkpoints", learner.state(), position)
    written = json_of(laminar, *words)
    assert written == {"version": version, "folder": str(out), "from": str(checkpoint.relative_to(tmp_path))}
    stored = load_file(out / "adapter_model.safetensors")
    assert len(stored) == len(learner.state().weights) > 0
    assert json.loads((out / "base_model.json").read_text())["version"] == version
    assert "exists already" in plain(laminar(*words)[2])


def plain(text: str) -> str:
    """`text` without the frame and line breaks of the terminal."""
    return " ".join(text.replace("│", " ").split())


def test_relays_are_listed_in_chain_order(laminar: Laminar, client: ClientProperties, run: str) -> None:
    links = tuple(RelayLink(relay, f"h{relay}:1", f"h{relay}", "/") for relay in (2, 0, 1))
    heartbeat = {"bytes": 10, "host": "h", "pid": 1, "sent_at": 0}
    send(
        client,
        run,
        RelayStatus(0, ("1.1",), **heartbeat, arriving=PolicyVersion(1, 2), arrived_bytes=1, arriving_bytes=4),
        RelayStatus(1, (), **heartbeat, received_per_s=2e6),
        RelayStatus(2, ("1.2", "1.1"), **heartbeat, sent_per_s=3e6, unreachable=("h8:1",)),
        RelayStatus(7, ("1.0",), **heartbeat),
        RelayStatus(8, (), **heartbeat, address="h8:1"),
        RelayChain(9, links, (1,), "binomial", 0),
    )
    printed = json_of(laminar, "relays")
    assert printed["chain"]["schedule"] == "binomial"  # type: ignore[index]
    found = [(row["relay"], row["position"], row["role"]) for row in printed["relays"]]  # type: ignore[index]
    assert found == [(2, 0, "master"), (0, 1, "relay"), (1, 2, "joining"), (7, None, "gone"), (8, None, "unreachable")]
    assert {row["relay"]: row["reported_by"] for row in printed["relays"] if row["reported_by"]} == {8: "2 of h"}  # type: ignore[index]
    listed = list(csv.DictReader(laminar("relays", "-O", "csv")[1].splitlines()))
    assert [(int(row["relay"]), row["role"]) for row in listed] == [(relay, role) for relay, _, role in found]
    shown = laminar("relays")[1]
    for text in ("1.2 25 %", "2.0 MB/s", "3.0 MB/s", "1.2, 1.1"):
        assert text in shown


def test_weights_diff_counts_elements(tmp_path: Path) -> None:
    from pipelines.run.weight_bytes import diff
    from schemas.records import TensorSpec

    specs = (TensorSpec("w", "F32", (4,)), TensorSpec("s", "BF16", ()))
    with WeightStore(tmp_path / "store") as store:
        manifests = [published(store, number, specs) for number in (1, 2)]
        rows = diff(store, *manifests)
    assert rows == [
        {"tensor": "s", "elements": 1, "changed": 1, "share": 1.0},
        {"tensor": "w", "elements": 4, "changed": 2, "share": 0.5},
    ]


def published(store: WeightStore, number: int, specs: tuple[object, ...]) -> WeightVersion:
    from infra.store.publisher import Publisher

    manifests: list[WeightVersion] = []
    publisher = Publisher(store, manifests.append, specs)  # type: ignore[arg-type]
    arrays = {"w": np.array([0, 1, number * 65537, number], np.float32), "s": np.array(number, np.uint16)}
    how = {"step": 1, "batches": (), "batch_offsets": (), "trajectories_trained": 0}
    publisher.publish(arrays, PolicyVersion(1, number), **how)  # type: ignore[arg-type]
    publisher.close()
    return manifests[0]
