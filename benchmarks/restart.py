"""The cost of starting each role after a short and after a long run.

`python -m benchmarks.restart` fills the log of a run on its own broker as after a number of trajectories and weight
versions whose work has ended, lets every role commit once, and then measures a start of each role in its own process:
from the session's first request until the step has processed all records. The processes are forks of one that has
imported everything, as those of `laminar run` are. The goal: after 10^6 trajectories and 20,000 versions at most 1.2
times the time after 10^4 and 100, and at most 10 s; otherwise the exit code is 1. `times` is the ratio of the CPU times
of the role's process: on a busy machine the other one says little. Memory is the peak of the process, imports included.
Both runs have as many metrics as an observer reads, or more, and the commit notes that compaction leaves of a run of
their size: every start reads all of them. Records are 1,000 rows of zeros, since no role may read them; those of the
last groups, which starts read back, are real, see `restart_end`. Manifests have the tensors of a 7B model. The roles
are those of an emulated run with an observer, a relay that lacks the newest versions, evaluation, gateway, agents and
autoscaler. `trainer (model)` is the trainer of a tiny model: it loads the newest checkpoint and restores that version
to an empty store. The gateway loads that model's tokenizer, and so does prompts, which goes on in a file of questions
where the run has left it, and draws the next ones.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import apache_beam as beam
from kafka import TopicPartition
from rich.console import Console
from rich.table import Table

from benchmarks import restart_model
from benchmarks.restart_end import READ_AGAIN, RunEnd, begins_of
from infra.files import create_secret
from infra.kafka.admin import admin_client, end_offsets
from infra.kafka.broker import BrokerConfig, start_broker
from infra.kafka.clients import KafkaClients
from infra.kafka.note import Note
from infra.kafka.observer import NEWEST, Observer
from infra.kafka.producer import BoundedProducer
from infra.kafka.session import Partition, Session
from operators.io.elements import Polled, Restored
from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.source import ShardSource
from pipelines.config import Config, KafkaConfig, parse_config
from pipelines.roles import EMULATED
from pipelines.run.topics import SEGMENT_BYTES, make_topics
from pipelines.run.zygote import import_role_modules
from schemas.codec import encode
from schemas.columns import token_ids
from schemas.records import CommitNote, Metric, PolicyVersion, Prompt, Sampling, TensorSpec, WeightVersion
from schemas.topics import (
    BATCHES,
    EXPERIENCES,
    INBOX,
    METRICS,
    PROGRESS,
    PROMPTS,
    RELAY,
    RESTORE,
    SCALING,
    SETTLED,
    TRAJECTORIES,
    group_name,
)

RUN, ROWS = "restarts", 1000
TOKEN = "token"
"""The file of the relays' token."""
MODEL_TRAINER, OBSERVER = "trainer (model)", "observer"
QUESTIONS, QUESTION_ROWS = "questions.jsonl", 10_000
WITH_MODEL = ("prompts", "gateway", MODEL_TRAINER)
PIPELINES = (
    *("prompts", "placement", "rollout", "score", "experience", "trainer", "relay", "evaluation"),
    *("gateway", "agents", "autoscaler"),
)
ROLES = (*PIPELINES, MODEL_TRAINER, OBSERVER)
LAYERS, TENSORS, CHUNKS = 28, 12, 480
"""The manifest of a 7B model."""
QUESTION = Prompt(0, "evaluation", "synthetic", "", token_ids([1]), "{}", 1, Sampling(1.0, 1.0, 0, 8, (), 0))
GOAL = 10**6
"""Updates of the run: it has not ended."""
MOST_TIMES, MOST_S = 1.2, 10.0
NOTES_PER_TRAJECTORY = 0.06
"""Commits of all roles together, in the demonstration."""
NOTE_STATE = "x" * 256
HELD_VERSIONS = 8
"""The newest manifests, which a relay and the trainer read again."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, nargs=2, default=[10**4, 10**6])
    parser.add_argument("--versions", type=int, nargs=2, default=[100, 20_000])
    parser.add_argument("--rounds", type=int, default=3, help="starts of each role; the fastest is reported")
    parser.add_argument("--roles", nargs="*", default=ROLES, choices=ROLES)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    preload()
    found = [
        after(*size, arguments.rounds, arguments.roles)
        for size in zip(arguments.trajectories, arguments.versions, strict=True)
    ]
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    table = Table(
        "role", *(f"{n:,} trajectories, {v:,} versions" for n, v in zip(*sizes(arguments), strict=True)), "times"
    )
    for role in arguments.roles:
        first, second = (each[role] for each in found)
        cells = [
            f"{each['seconds']:.2f} s, CPU {each['cpu_seconds']:.2f} s, {each['megabytes']:.0f} MB"
            for each in (first, second)
        ]
        table.add_row(role, *cells, f"{second['cpu_seconds'] / first['cpu_seconds']:.2f}")
    Console(width=140).print(table)
    if missed := [role for role in arguments.roles if misses_goal(*(each[role] for each in found))]:
        sys.exit(f"over {MOST_TIMES} times the CPU time, or over {MOST_S:g} s: {', '.join(missed)}")


def misses_goal(first: Mapping[str, float], second: Mapping[str, float]) -> bool:
    """Whether a start after the long run takes too long, or too much longer than after the short one."""
    return second["seconds"] > MOST_S or second["cpu_seconds"] > MOST_TIMES * first["cpu_seconds"]


def sizes(arguments: argparse.Namespace) -> tuple[list[int], list[int]]:
    return arguments.trajectories, arguments.versions


def preload() -> None:
    """Import what the process imports from which `laminar run` forks its roles, and the roles of an emulated run."""
    import_role_modules()
    import_role_modules(EMULATED)


def after(trajectories: int, versions: int, rounds: int, roles: Sequence[str]) -> dict[str, Any]:
    """The fastest start of each of `roles` after a run of this size."""
    tempfile.tempdir = None  # the default again
    with tempfile.TemporaryDirectory() as scratch, start_broker(BrokerConfig(Path(scratch) / "kafka")) as broker:
        servers, folder = broker.bootstrap_servers, Path(scratch)
        tempfile.tempdir = scratch  # of the children, too: Beam leaves folders there
        began = time.monotonic()
        in_child(lambda: make_run(servers, folder, trajectories, versions))
        print(f"filled in {time.monotonic() - began:.0f} s", file=sys.stderr)
        found = {}
        for role in roles:
            starts = [in_child(lambda role=role: measure(role, servers, folder)) for _ in range(rounds)]
            found[role] = min(starts, key=seconds)
            print(f"{role}: {found[role]}", file=sys.stderr)
        return found


def in_child(work: Callable[[], Mapping[str, float]]) -> dict[str, float]:
    """The result of `work` in a fork of this process. Raises RuntimeError if it failed."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(writer, json.dumps(work()).encode())
            os._exit(0)
        except BaseException:  # noqa: BLE001 - the child must end here
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as source:
        answer = source.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"process {child} ended with status {status}, see its output above")
    result: dict[str, float] = json.loads(answer)
    return result


def make_run(servers: str, folder: Path, trajectories: int, versions: int) -> dict[str, float]:
    """Write the log of a run of this size, with a last commit of each role."""
    config = config_of(servers, folder)
    create_secret(folder / TOKEN)
    rows = ({"prompt": f"{number} + 1 =", "answer": str(number + 1)} for number in range(QUESTION_ROWS))
    (folder / QUESTIONS).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    make_topics(config)
    with ExitStack() as sessions:
        opened = {role: Session(graph_of(config, role)[0].session()) for role in PIPELINES}
        for session in opened.values():
            sessions.callback(session.close)
        fill(config, trajectories, versions, folder)
        fill_notes(config, int(trajectories * NOTES_PER_TRAJECTORY))
        end = RunEnd(RUN, trajectories, versions, config.rollout.processes)
        before = ends_of(config, opened.values())
        end.write(opened)
        after = ends_of(config, opened.values())
        for role, session in opened.items():
            commit(role, session, end, before, after)
    return {}


def ends_of(config: Config, sessions: Iterable[Session]) -> dict[Partition, int]:
    """The present ends of all inputs and ledgers of `sessions`."""
    names = {name for session in sessions for name, *_ in [*session.config.ledger, *session.positions()]}
    with admin_client(config.kafka.client()) as admin:
        return {Partition(*where): end for where, end in end_offsets(admin, sorted(names)).items()}


def seconds(measured: dict[str, float]) -> float:
    return measured["cpu_seconds"]


def measure(role: str, servers: str, folder: Path) -> dict[str, float]:
    """Measure one start of `role` in this process."""
    if role == OBSERVER:
        return timed(lambda: observe(config_of(servers, folder)))
    with tempfile.TemporaryDirectory() as store:
        config = config_of(servers, folder, store, with_model=role in WITH_MODEL)
        return measure_start("trainer" if role == MODEL_TRAINER else role, config)


def measure_start(role: str, config: Config) -> dict[str, float]:
    """One start, with the numbers of records that it reads back and reads, and of its outputs."""
    shard, step = graph_of(config, role)
    if role == "evaluation":
        step = replace(step, questions=lambda: [QUESTION])
    source = ShardSource(shard)
    folds, counts = [], Counter[str]()

    def until_caught_up() -> None:
        element = source.next(wait=True)
        assert isinstance(element, Restored)
        folds.append(fold := step.restore(element))
        counts["ledger"] = len(element.ledger)
        caught_up = False
        while not caught_up:
            polled = source.next(wait=not fold.busy())
            assert isinstance(polled, Polled)
            counts["records"] += len(polled.records)
            counts["outputs"] += len(fold.fold(polled))
            fold.checkpoint(polled.positions)
            caught_up = polled.caught_up

    measured = timed(until_caught_up)
    folds[0].close()
    source.close()
    return measured | counts


def timed(work: Callable[[], None]) -> dict[str, float]:
    began, used = time.monotonic(), time.process_time()
    work()
    took, spent = time.monotonic() - began, time.process_time() - used
    return {"seconds": took, "cpu_seconds": spent, "megabytes": peak_bytes() / 1e6}


def peak_bytes() -> int:
    """The peak memory of this process. `ru_maxrss` would be that of the process that started it, if that is larger."""
    (peak,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024


def observe(config: Config) -> None:
    with Observer(config.kafka.client(), RUN) as observer:
        while not observer.caught_up():
            observer.poll(0.1)


def config_of(servers: str, folder: Path, store: str = "not used", *, with_model: bool = False) -> Config:
    """The configuration of a run with its files in `folder`: an emulated one, or one with the model there."""
    questions = {"source": "jsonl", "path": str(folder / QUESTIONS), "task": "chain_sum"}
    settings: dict[str, Any] = {
        "run": {"name": RUN, "folder": str(folder)},
        "prompts": questions if with_model else {"source": "synthetic"},
        "relay": {"store": store, "token_file": str(folder / TOKEN)},
        "trainer": {"optimizer_steps": GOAL},
        **({"model": {"path": str(folder / "model")}} if with_model else {"rollout": {"engine": "emulated"}}),
    }
    parsed = parse_config(settings, "the benchmark")
    return replace(parsed, kafka=KafkaConfig(servers, replication_factor=1))


def graph_of(config: Config, role: str) -> tuple[Any, Any]:
    """The shard and the step of a role's pipeline."""
    pipeline = beam.Pipeline(runner="FnApiRunner")
    importlib.import_module(f"pipelines.{role}").build(pipeline, config=config)
    parts = [part.transform for part in pipeline.transforms_stack[0].parts]
    (shard,) = next(part for part in parts if isinstance(part, ReadTopics)).shards
    return shard, next(part for part in parts if isinstance(part, FoldRecords)).step


def fill(config: Config, trajectories: int, versions: int, folder: Path) -> None:
    """Write the topics of a run with so many trajectories and versions; the newest is that of a model in `folder`."""
    per_row = {PROMPTS: 300, INBOX: 400, PROGRESS: 300, TRAJECTORIES: 600, EXPERIENCES: 700, SETTLED: 40, BATCHES: 500}
    per_row |= {SCALING: 1}
    with BoundedProducer(config.kafka.client()) as producer:
        for _ in range(trajectories // ROWS):
            for topic, size in per_row.items():
                producer.send(topic.name(RUN), bytes(size * ROWS), partition=0)
        for number in range(max(NEWEST[METRICS.short_name], trajectories // 10)):
            value, headers = encode(
                Metric("rollout", 0, {"cpu/process_seconds": float(number), "kv/reused": 1.0}, number)
            )
            producer.send(METRICS.name(RUN), value, headers=headers)
        for value, headers, key in manifests(versions - 1):
            producer.send(RELAY.name(RUN), value, key=key, headers=headers)
        producer.flush(600)
        with admin_client(config.kafka.client()) as admin:
            (batches,) = end_offsets(admin, [BATCHES.name(RUN)]).values()
        newest = restart_model.prepare(folder, RUN, PolicyVersion(1, versions - 1), batches)
        value, headers = encode(newest)
        producer.send(RELAY.name(RUN), value, key=str(newest.version).encode(), headers=headers)
        producer.flush(600)


def fill_notes(config: Config, commits: int) -> None:
    """Write the notes of so many commits, each in a transaction of its own, or the newest that compaction leaves."""
    place, group = TopicPartition(RESTORE.name(RUN), 0), group_name(RUN, "export")
    with closing(KafkaClients(config.kafka.client()).producer(group, 60.0)) as producer:
        producer.init_transactions()
        written, number = 0, 0
        while number < commits and written < 2 * SEGMENT_BYTES:
            number += 1
            value, headers = encode(CommitNote(group, Note(1, {}, {"state": NOTE_STATE}, {}, number).encode(), 0))
            producer.begin([place])
            producer.send(place.topic, value, group.encode(), list(headers), place.partition)
            producer.flush()
            producer.commit_transaction()
            written += len(value)


def manifests(versions: int) -> Iterator[tuple[bytes, Any, bytes]]:
    specs = tuple(
        TensorSpec(f"model.layers.{layer}.block.{tensor}.weight", "bfloat16", (3584, 3584))
        for layer in range(LAYERS)
        for tensor in range(TENSORS)
    )
    value, headers = encode(manifest(PolicyVersion(1, 7_777_777), specs))
    for number in range(versions):
        version = f"1.{number}"
        yield value.replace(b"7777777", str(number).encode()), headers, version.encode()


def manifest(version: PolicyVersion, specs: tuple[TensorSpec, ...]) -> WeightVersion:
    return WeightVersion(
        version=version,
        parent=None,
        step=7_777_777,
        file="7777777.safetensors",
        bytes=15_000_000_000,
        blake3="ab" * 32,
        tensors=specs,
        batches=(7_777_777,),
        batch_offsets=(0,),
        trajectories_trained=0,
        final=False,
        created_at=0,
        chunk_bytes=32 << 20,
        chunk_checksums=tuple(4_000_000_000 + number for number in range(CHUNKS)),
    )


def commit(
    role: str, session: Session, end: RunEnd, before: Mapping[Partition, int], after: Mapping[Partition, int]
) -> None:
    """Commit for a role the note that it has at the end of the run. `before` and `after` are the ends of its topics
    without and with the last groups: every input is read to its end, but what a start reads again.
    """
    positions = {place: after[place] for place in session.positions()}
    again = begins_of(before, RUN, READ_AGAIN.get(role, ()))
    positions |= {place: offset for place, offset in again.items() if place in positions}
    relay = Partition(RELAY.name(RUN), 0)
    if role in ("relay", "trainer") and relay in positions:
        positions[relay] = max(0, after[relay] - HELD_VERSIONS)
    state = end.state(role, lambda topic: after[Partition(topic.name(RUN), 0)])
    if role == "trainer":
        trained = {"offsets": [after[Partition(BATCHES.name(RUN), 0)]], "number": end.versions}
        state = {"published": end.versions - 1, "trained": {**trained, "published": str(end.newest)}}
    ledger = {f"{where.topic}:{where.partition}": before[where] for where in session.config.ledger}
    session.commit([], positions, ledger, state)


if __name__ == "__main__":
    main()
