"""A run whose trainer is two processes and whose buffer is two, all killed: the books, and the weights three times."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from conftest import StartRun
from kills import kill
from laminar_runs import Command, LaminarRun, Nursery
from small_runs import LEARNS

from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from infra.kafka.topic_reader import StoredRecord, read_topic
from infra.listening import exposed_addresses, listening_sockets
from infra.models.checkpoint_folder import load_model
from infra.models.weights import weight_tensors
from pipelines.config import load_config
from schemas.topics import BATCHES, SETTLED, Topic

STEPS = 30
CHANGES = ("trainer.ranks=2", f"trainer.optimizer_steps={STEPS}", "trainer.checkpoint_every=5")
SHARDS = ("experience.shards=2", "kafka.partitions=2")


def test_killed_ranks_train_the_same_weights(
    start_run: StartRun, nursery: Nursery, broker: Broker, run_id: str
) -> None:
    servers = f"kafka.bootstrap_servers={broker.bootstrap_servers}"
    run = start_run(run_id, servers, *CHANGES, *SHARDS, LEARNS, "experience.micro_batch_tokens=128")
    moments = random.Random(0)
    for least, role in ((2, "trainer-1"), (7, "experience-1"), (12, "trainer"), (17, "experience")):
        until_trained(run, least + moments.randrange(5))
        assert not exposed_addresses(listening_sockets(run.processes()))  # torch's store and collectives included
        kill(run, role)
    assert run.wait(240) == 0, run.said()
    audit = run.audit()
    assert audit["passed"]
    assert (audit["trained"], audit["lost"], audit["trained_twice"], audit["failed"]) == (STEPS * 16, 0, 0, 0)
    restarts = {name: role["restarts"] for name, role in run.state()["roles"].items()}
    assert min(restarts["trainer"], restarts["trainer-1"]) >= 2, restarts  # its own, and that of the other
    assert (restarts["experience"], restarts["experience-1"]) == (1, 1)
    parts = {(part.batch, record.partition) for record in written(run, BATCHES) for part in record.rows}
    assert parts >= {(batch, partition) for batch in range(STEPS) for partition in range(4)}
    settled = Counter(row.trajectory_id for record in written(run, SETTLED) for row in record.rows)
    assert max(settled.values()) == 1
    assert not run.traces()
    replay(nursery, run)  # by two ranks: it ends with 0 where all bits are the same
    alone = replay(nursery, run, "--set", "trainer.ranks=1", "--set", f"trainer.optimizer_steps={STEPS}")
    ours, theirs, first = (
        weight_tensors(load_model(Path(path))) for path in (run.folder / "model", alone, start_of(run))
    )
    gone = sum(float((ours[name] - first[name]).norm() ** 2) for name in ours) ** 0.5
    apart = sum(float((ours[name] - theirs[name]).norm() ** 2) for name in ours) ** 0.5
    assert 0 < apart < 1e-2 * gone  # sums in another order, and AdamW makes whole steps of what is hardly a gradient
    assert all(torch.allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-4) for name in ours)


def written(run: LaminarRun, topic: Topic) -> Iterator[StoredRecord]:
    """What `run` has written to `topic`."""
    return read_topic(ClientProperties.at(run.state()["bootstrap_servers"]), topic.name(run.name))


def until_trained(run: LaminarRun, steps: int) -> None:
    """Wait until the trainer has told of so many steps."""
    metrics = run.folder / "metrics.jsonl"
    run.until(lambda: metrics.exists() and metrics.read_text().count('"name":"trainer"') >= steps, 240, f"step {steps}")


def start_of(run: LaminarRun) -> str:
    """The folder of the model that `run` began with."""
    return load_config(run.folder / "config.toml").model.path


def replay(nursery: Nursery, run: LaminarRun, *words: str) -> Path:
    """Train again what `run` has left in its log; the model that comes of it."""
    out = run.here / f"again{len(words)}"
    told = Command(
        nursery,
        out / "here",
        "train",
        "replay",
        run.name,
        "--folder",
        str(run.folder.parent),
        "--out",
        str(out / "it"),
        *words,
    )
    assert told.wait(150) == 0, told.said()
    return out / "it" / "model"
