"""A pipeline that writes its records in another order than it reads them, in processes that can be killed.

Run as a program it is a zygote: it imports all modules once. For each line on standard input it forks a process that
runs the pipeline, and prints the process id. A line is: address, run, runner, and optionally the point at which the
process kills itself.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import apache_beam as beam

from infra.kafka.properties import ClientProperties
from infra.kafka.session import Session
from infra.runners.options import RunnerName
from infra.runners.run import run_pipeline
from operators.io.config import ShardConfig, TopicInput
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, Restored
from operators.io.fold_records import FoldRecords
from operators.io.ledger import TrajectoryLedger
from operators.io.pending import PendingOffsets
from operators.io.read_topics import ReadTopics
from operators.io.shards import close_shards
from operators.io.write_transactionally import WriteTransactionally
from schemas.identity import TrajectoryKey
from schemas.topics import METRICS, PLANS

SOURCE, OUTPUT = METRICS, replace(PLANS, record_names=METRICS.record_names)
CAPACITY = 12
PIPELINE = "shuffling"


def shard(bootstrap_servers: str, run: str, **changes: float) -> ShardConfig:
    return ShardConfig(
        ClientProperties.at(bootstrap_servers),
        run,
        PIPELINE,
        inputs=(TopicInput(SOURCE),),
        ledger=((OUTPUT, (0,)),),
        **{"poll_s": 0.02, **changes},  # type: ignore[arg-type]
    )


class Shuffler:
    """Holds up to twelve records; emits a random one for each further record, and one at each idle tick."""

    def __init__(self, restored: Restored) -> None:
        self._rng = random.Random(restored.start)
        self._ledger = TrajectoryLedger(1, restored.state)
        for received in restored.ledger:
            self._ledger.add(TrajectoryKey("train", received.record.step, 0), 1, 0)
        self._buffer: list[tuple[PartitionKey, int, object]] = []
        self._pending = PendingOffsets()
        self._emission = 0

    def fold(self, polled: Polled) -> Sequence[Output]:
        self._emission += 1
        outputs = []
        for received in polled.records:
            if TrajectoryKey("train", received.record.step, 0) not in self._ledger:
                key = PartitionKey(received.topic, received.partition)
                self._pending.add(key, received.offset)
                self._buffer.append((key, received.offset, received.record))
            if len(self._buffer) > CAPACITY:
                outputs.append(self._emit_one())
        if not polled.records and self._buffer:
            outputs.append(self._emit_one())
        return outputs

    def _emit_one(self) -> Output:
        key, offset, record = self._buffer.pop(self._rng.randrange(len(self._buffer)))
        self._pending.remove(key, offset)
        step = record.step  # type: ignore[attr-defined]
        self._ledger.add(TrajectoryKey("train", step, 0), 1, self._emission)
        return Output(OUTPUT, str(step), record)

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        return Checkpoint(self._pending.low_water(positions), self._ledger.oldest_emission(), self._ledger.state())

    def busy(self) -> bool:
        return False

    def close(self) -> None:
        self._buffer.clear()


@dataclass(frozen=True)
class Shuffle:
    def restore(self, restored: Restored) -> Shuffler:
        return Shuffler(restored)


def build(pipeline: beam.Pipeline, config: ShardConfig) -> None:
    elements = pipeline | "read" >> ReadTopics(config)
    elements | "shuffle" >> FoldRecords(Shuffle()) | "write" >> WriteTransactionally(config)


def run(bootstrap_servers: str, run_id: str, runner: RunnerName, kill_point: str = "") -> None:
    """Run the pipeline in this process until a stop signal."""
    if kill_point:
        _kill_at(kill_point)
    config = shard(bootstrap_servers, run_id)
    run_pipeline(lambda pipeline: build(pipeline, config), runner, (), close_shards)


def _kill_at(point: str) -> None:
    """Kill or stop this process around its tenth transaction with outputs."""
    commit, left = Session.commit, 10

    def commit_and_kill(self: Session, outputs: Sequence[object], *rest: object) -> object:
        nonlocal left
        left -= bool(outputs)
        if left:
            return commit(self, outputs, *rest)  # type: ignore[arg-type]
        end = self._producer.commit_transaction

        def end_and_kill() -> None:
            self._producer.flush()
            if point == "after":
                end()
            os.kill(os.getpid(), signal.SIGSTOP if point == "stop" else signal.SIGKILL)
            end()

        self._producer.commit_transaction = end_and_kill
        return commit(self, outputs, *rest)  # type: ignore[arg-type]

    Session.commit = commit_and_kill  # type: ignore[method-assign,assignment]


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run(*line.split())  # type: ignore[arg-type]
            sys.exit()
        print(pid, flush=True)


if __name__ == "__main__":
    main()
