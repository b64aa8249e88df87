"""A run with two trainer ranks and two experience shards, all killed, then with one rank: audit, replays of weights."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kills import kill
from laminar_runs import Command, CommandServer, LaminarRun, StartRun
from small_runs import LENGTH_REWARD

from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from infra.kafka.topic_reader import StoredRecord, read_topic
from infra.listening import exposed_addresses, listening_sockets
from infra.models.checkpoint_folder import load_model
from infra.models.weights import weight_tensors
from pipelines.config import load_config
from schemas.topics import BATCHES, SETTLED, Topic

RANKS = ("trainer", "trainer-1")
STEPS, MORE_STEPS = 32, 36
CHANGES = ("trainer.ranks=2", f"trainer.optimizer_steps={STEPS}", "trainer.checkpoint_every=4")
ONE_RANK = ("trainer.ranks=1", "trainer.batch_shares=2", f"trainer.optimizer_steps={MORE_STEPS}")
SHARDS = ("experience.shards=2", "kafka.partitions=2")


@pytest.mark.slow
def test_killed_ranks_train_the_same_weights(
    start_run: StartRun, command_server: CommandServer, broker: Broker, run_id: str
) -> None:
    servers = f"kafka.bootstrap_servers={broker.bootstrap_servers}"
    run = start_run(run_id, servers, *CHANGES, *SHARDS, LENGTH_REWARD, "experience.micro_batch_tokens=128")
    rng = random.Random(0)
    for first_step, role in ((2, "trainer-1"), (5, "experience-1"), (8, "trainer"), (11, "experience")):
        until_trained(run, first_step + rng.randrange(3))
        assert not exposed_addresses(listening_sockets(run.processes()))  # including torch's store and collectives
        (kill_rank if role in RANKS else kill)(run, role)
    assert run.wait(600) == 0, run.output()
    restarts = {name: role["restarts"] for name, role in run.state()["roles"].items()}
    assert min(restarts[rank] for rank in RANKS) >= 2, f"{restarts}\n{run.output()}"  # own kill, and that of the other
    assert (restarts["experience"], restarts["experience-1"]) == (1, 1)
    replay(command_server, run)  # with two ranks: exit code 0 if all bits are equal
    run.resume(*ONE_RANK)
    assert run.wait(600) == 0, run.output()
    audit = run.audit()
    assert audit["passed"]
    assert (audit["trained"], audit["lost"], audit["trained_twice"], audit["failed"]) == (MORE_STEPS * 16, 0, 0, 0)
    assert "trainer-1" not in run.state()["roles"]
    parts = {(part.batch, record.partition) for record in written(run, BATCHES) for part in record.rows}
    assert parts >= {(batch, partition) for batch in range(MORE_STEPS) for partition in range(4)}
    settled = Counter(row.trajectory_id for record in written(run, SETTLED) for row in record.rows)
    assert max(settled.values()) == 1
    assert not run.leftovers()
    replay(command_server, run, "--json")  # first with two ranks, then with one
    single_rank = replay(command_server, run, "--set", "trainer.ranks=1")  # with one for all batches
    trained, replayed, first = (
        weight_tensors(load_model(Path(path))) for path in (run.folder / "model", single_rank, initial_model(run))
    )
    distance_trained = sum(float((trained[name] - first[name]).norm() ** 2) for name in trained) ** 0.5
    distance_replayed = sum(float((trained[name] - replayed[name]).norm() ** 2) for name in trained) ** 0.5
    assert 0 < distance_replayed < 1e-2 * distance_trained  # sums in another order; AdamW amplifies tiny gradients
    assert all(torch.allclose(trained[name], replayed[name], rtol=1e-3, atol=1e-4) for name in trained)


def written(run: LaminarRun, topic: Topic) -> Iterator[StoredRecord]:
    """The records that `run` wrote to `topic`."""
    return read_topic(ClientProperties.at(run.state()["bootstrap_servers"]), topic.name(run.name))


def kill_rank(run: LaminarRun, role: str) -> None:
    """Kill the rank `role`, which ends the other one, too, and return once both have joined again."""
    before = {rank: times_joined(run, rank) for rank in RANKS}
    kill(run, role)
    run.until(lambda: all(times_joined(run, rank) > before[rank] for rank in RANKS), 240, "both ranks joined")


def times_joined(run: LaminarRun, rank: str) -> int:
    """How often the processes of `rank` have joined the other rank."""
    return (run.folder / "logs" / f"{rank}.log").read_text().count("has joined the process group")


def until_trained(run: LaminarRun, steps: int) -> None:
    """Wait until metrics.jsonl has `steps` optimizer steps."""
    metrics = run.folder / "metrics.jsonl"
    run.until(lambda: metrics.exists() and metrics.read_text().count('"name":"trainer"') >= steps, 240, f"step {steps}")


def initial_model(run: LaminarRun) -> str:
    """The folder of the initial model of `run`."""
    return load_config(run.folder / "config.toml").model.path


def replay(command_server: CommandServer, run: LaminarRun, *arguments: str) -> Path:
    """Replay the training of `run` from its log. Returns the folder of the resulting model."""
    out = run.here / f"again{len(arguments)}"
    command = Command(
        command_server,
        out / "here",
        "train",
        "replay",
        run.name,
        "--folder",
        str(run.folder.parent),
        "--out",
        str(out / "it"),
        *arguments,
    )
    assert command.wait(150) == 0, command.output()
    return out / "it" / "model"
