"""A pipeline whose outputs leave in another order than its inputs came, in processes that can be killed.

Run as a program it is a nursery: it imports everything once, then forks a process that runs the pipeline for each line
on its standard input, and tells its process id. A line is: address, run, runner, and the moment at which the process
kills itself, if any.
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
from infra.runners.options import Runner
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
    """Holds up to twelve records and lets go of a random one for each that comes, and of one at each idle tick."""

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
                place = PartitionKey(received.topic, received.partition)
                self._pending.add(place, received.offset)
                self._buffer.append((place, received.offset, received.record))
            if len(self._buffer) > CAPACITY:
                outputs.append(self._let_go())
        if not polled.records and self._buffer:
            outputs.append(self._let_go())
        return outputs

    def _let_go(self) -> Output:
        place, offset, record = self._buffer.pop(self._rng.randrange(len(self._buffer)))
        self._pending.remove(place, offset)
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


def run(bootstrap_servers: str, run_id: str, runner: Runner, suicide: str = "") -> None:
    """Run the pipeline in this process until it is asked to stop."""
    if suicide:
        _die(suicide)
    config = shard(bootstrap_servers, run_id)
    run_pipeline(lambda pipeline: build(pipeline, config), runner, (), close_shards)


def _die(when: str) -> None:
    """Make this process kill or stop itself around the tenth transaction that has outputs."""
    commit, left = Session.commit, 10

    def deadly(self: Session, outputs: Sequence[object], *rest: object) -> object:
        nonlocal left
        left -= bool(outputs)
        if left:
            return commit(self, outputs, *rest)  # type: ignore[arg-type]
        end = self._producer.commit_transaction

        def at_the_end() -> None:
            self._producer.flush()
            if when == "after":
                end()
            os.kill(os.getpid(), signal.SIGSTOP if when == "stop" else signal.SIGKILL)
            end()

        self._producer.commit_transaction = at_the_end
        return commit(self, outputs, *rest)  # type: ignore[arg-type]

    Session.commit = deadly  # type: ignore[method-assign,assignment]


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead need not be waited for
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
