"""The cost of placement: a plan for 1,000 replicas, and the work per trajectory with growing numbers of replicas.

`python -m benchmarks.placement` prints a table, with `--json` the figures. It measures all of placement's work for a
trajectory except Kafka itself: decoding polled records, the fold, the checkpoint, and encoding the outputs, in CPU
seconds of this process.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from rich.console import Console
from rich.table import Table

from infra.kafka.properties import ClientProperties
from infra.runners.garbage_collection import reduce_gc_frequency
from operators.io.coalesce import coalesce
from operators.io.config import ShardConfig
from operators.io.elements import Output, PartitionKey, Polled, ReceivedRecord, Restored
from operators.io.repartition import repartition
from operators.placement.config import PlacementConfig
from operators.placement.place_trajectories import PlacementFold, PlaceTrajectories
from operators.placement.repack import KVLoad, plan_repack
from schemas.codec import decode, encode
from schemas.columns import flags, floats, token_ids
from schemas.records import (
    Assignment,
    PolicyVersion,
    Progress,
    Prompt,
    ReplicaStatus,
    Response,
    Sampling,
    Settled,
    Trajectory,
    VersionSpan,
    WeightVersion,
)
from schemas.topics import INBOX, PROGRESS, PROMPTS, RELAY, REPLICAS, SETTLED, TRAJECTORIES, Topic, partition_of

PARTITIONS, SAMPLES, SLOTS, TOKENS, DELTAS = 4, 8, 32, 256, 2
POLL = 512
VERSION = PolicyVersion(1, 0)
RUN = "benchmark"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument(
        "--trajectories",
        type=int,
        default=12_288,
        help="trajectories per number of replicas and round: more than their slots",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds over all numbers of replicas; medians are reported"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    reduce_gc_frequency()  # as a pipeline does
    figures: dict[str, Any] = {"machine": f"{platform.machine()}, Python {platform.python_version()}"}
    figures["plan_ms"] = plan_ms()
    rounds = [
        [lifetime(count, arguments.trajectories) for count in arguments.replicas] for _ in range(arguments.rounds)
    ]
    figures["placement"] = [_median(each) for each in zip(*rounds, strict=True)]
    if arguments.json:
        print(json.dumps(figures, indent=1))
        return
    table = Table(title=f"Placement on one core ({figures['machine']})")
    for column in ("replicas", "trajectories", "events/s", "µs a trajectory"):
        table.add_column(column, justify="right")
    for row in figures["placement"]:
        table.add_row(
            *(f"{row[key]:,.0f}" for key in ("replicas", "trajectories", "events_per_s", "us_per_trajectory"))
        )
    Console().print(table)
    Console().print(f"plan_repack, 1,000 replicas × 64 trajectories: {figures['plan_ms']:.1f} ms")


def plan_ms(replicas: int = 1000, trajectories: int = 64, rounds: int = 15) -> float:
    """The median CPU time of a plan for various loads, in milliseconds."""
    times = []
    for seed in range(rounds):
        rng = random.Random(seed)
        loads = [
            KVLoad(
                replica=i,
                kv_used=rng.randrange(90_000),
                kv_capacity=100_000,
                kv_before=rng.randrange(100_000),
                requests=trajectories,
                waiting=rng.choice([0, 0, 0, 8]),
                most_requests=4 * trajectories,
                growth=rng.randrange(20_000),
            )
            for i in range(replicas)
        ]
        started = time.process_time()
        assert plan_repack(loads)
        times.append(time.process_time() - started)
    return 1000 * statistics.median(times)


def lifetime(replicas: int, trajectories: int) -> dict[str, float]:
    """The cost of `trajectories` from prompt to settlement, with `replicas` replicas."""
    placing = _PlacementRun(replicas, trajectories)
    placing.run()
    return {
        "replicas": replicas,
        "trajectories": trajectories,
        "events_per_s": placing.events / placing.seconds,
        "us_per_trajectory": 1e6 * placing.seconds / trajectories,
    }


def _median(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return sorted(rows, key=lambda row: row["us_per_trajectory"])[len(rows) // 2]


class _PlacementRun:
    def __init__(self, replicas: int, trajectories: int) -> None:
        shard = ShardConfig(ClientProperties.at("localhost:1"), RUN, "placement")
        step = PlaceTrajectories(
            PlacementConfig(max_replicas=replicas, repack_s=1.0), shard, PARTITIONS, trajectories, 1, replicas
        )
        self.now = 0.0
        restored = Restored("", 1, (), {}, {})
        self._placing = PlacementFold(step, restored, lambda process: None, lambda: self.now, lambda: 0)
        self._replicas, self._trajectories = replicas, trajectories
        self._offsets: dict[PartitionKey, int] = {}
        self.seconds = 0.0
        self.events = 0

    def run(self) -> None:
        """Every replica fills up, reports progress twice, finishes, and starts again, until all prompts are done."""
        self._fold([(RELAY, _manifest(), 0)])
        prompts = [_prompt(n) for n in range(self._trajectories // SAMPLES)]
        assigned: list[Assignment] = []
        settled = 0
        while settled < self._trajectories:
            heartbeats = [(REPLICAS, _status(r), 0) for r in range(self._replicas)]
            fresh, prompts = prompts[: self._replicas * SLOTS // SAMPLES], prompts[self._replicas * SLOTS // SAMPLES :]
            assigned = self._fold([*heartbeats, *((PROMPTS, prompt, 0) for prompt in fresh)])
            for start in range(0, DELTAS * TOKENS // 4, TOKENS // 4):
                self._each((PROGRESS, _progress(a, start), 0) for a in assigned)
            self._each((TRAJECTORIES, _finished(a), partition_of(a.prompt.number, PARTITIONS)) for a in assigned)
            self._each((SETTLED, _settled(a), 0) for a in assigned)
            assert assigned, "placement assigned no trajectory"
            settled += len(assigned)
            self.now += 0.5

    def _each(self, records: Iterator[tuple[Topic, Any, int]]) -> None:
        while part := list(islice(records, POLL)):
            self.events += len(part)
            self._fold(part)

    def _fold(self, records: Sequence[tuple[Topic, Any, int]]) -> list[Assignment]:
        encoded = []
        for topic, record, partition in records:
            key = PartitionKey(topic.short_name, partition)
            offset = self._offsets[key] = self._offsets.get(key, -1) + 1
            encoded.append((key, offset, *encode(record)))
        positions = {
            PartitionKey(t.short_name, p): 0
            for t in (PROMPTS, PROGRESS, SETTLED, TRAJECTORIES)
            for p in range(PARTITIONS)
        }
        positions |= {key: offset + 1 for key, offset in self._offsets.items()}
        started = time.process_time()
        received = tuple(
            ReceivedRecord(*key, offset, row)
            for key, offset, value, headers in encoded
            for row in decode(value, headers)
        )
        outputs: list[Output] = repartition(self._placing.fold(Polled("", 1, received, (), positions, True)))
        self._placing.checkpoint(positions)
        coalesce(outputs, lambda topic: topic.short_name)
        self.seconds += time.process_time() - started
        return [output.record for output in outputs if output.topic is INBOX and isinstance(output.record, Assignment)]


def _prompt(number: int) -> Prompt:
    sampling = Sampling(1.0, 1.0, 0, 1024, (2,), 0)
    return Prompt(number, "train", "task", "question " * 20, token_ids([7] * 64), "{}", SAMPLES, sampling)


def _response(tokens: int) -> Response:
    return Response(token_ids([5] * tokens), floats([-0.5] * tokens), flags([True] * tokens))


def _progress(a: Assignment, start: int) -> Progress:
    tokens = TOKENS // 4
    spans = (VersionSpan(VERSION, tokens),)
    return Progress(
        a.trajectory_id, a.lease, a.attempt, a.replica, a.incarnation, start, _response(tokens), spans, None, None, 0
    )


def _finished(a: Assignment) -> Trajectory:
    assigned = ("prompt", "member", "lease", "attempt", "replica", "incarnation")
    return Trajectory(
        **{name: getattr(a, name) for name in assigned},
        response=_response(TOKENS),
        text="answer " * 40,
        version_spans=(VersionSpan(VERSION, TOKENS),),
        newest_version=VERSION,
        finish_reason="stop",
        error=None,
        started_at=0,
        first_token_at=None,
        finished_at=0,
    )


def _settled(a: Assignment) -> Settled:
    return Settled(a.trajectory_id, SAMPLES, "dropped", "benchmark", None, None, TOKENS, 0)


def _status(replica: int) -> ReplicaStatus:
    kv = SLOTS * 1024
    return ReplicaStatus(replica, replica, 1, "running", VERSION, 0, 0, SLOTS, 0, kv, 0, 0.0, "", 0, 0, RUN)


def _manifest() -> WeightVersion:
    return WeightVersion(VERSION, None, 0, "", 0, "", (), (), (), 0, False, 0)


if __name__ == "__main__":
    main()
