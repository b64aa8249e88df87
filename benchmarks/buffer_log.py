"""The experience buffer on logs of a given length: on Kafka, and in memory.

`experience.py` measures both in slices; each slice continues at the end of the log.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import psutil
import pyarrow as pa

from infra.kafka.broker import Broker
from infra.kafka.producer import BoundedProducer
from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import partition_ranges
from infra.kafka.sessions import SESSIONS
from infra.kafka.topic_reader import read_topic
from infra.runners.run import run_pipeline
from infra.runners.stopping import STOPPING
from operators.experience.config import ExperienceConfig
from operators.experience.make_batches import MakeBatches
from operators.experience.pack_batches import pack_batches
from operators.io.elements import PartitionKey, Polled, ReceivedRecord, Restored
from operators.io.shards import close_shards
from pipelines import experience
from pipelines.config import Config
from pipelines.run.topics import make_topics
from schemas import records as r
from schemas.block import Block
from schemas.block_codec import encode_block
from schemas.codec import MAX_ROWS
from schemas.columns import flags, floats, token_ids
from schemas.topics import EXPERIENCES, METRICS, group_name

SAMPLES = 8
RECORDS_A_POLL = 8
"""Records a poll of `InMemory`: about as many as a fetch of one megabyte returns."""
LIMIT_S = 900.0


@dataclass(frozen=True)
class Measured:
    """One slice: trajectories/s, and CPU microseconds per trajectory of this process and of the broker."""

    stage: str
    log: int
    trajectories: int
    per_second: float
    cpu_us: float
    broker_cpu_us: float


class BufferLog(Protocol):
    """A buffer that has processed `written` trajectories."""

    @property
    def written(self) -> int:
        """Trajectories published so far."""

    def extend(self, length: int) -> None:
        """Extend the log to `length` trajectories or a few more, and process them all."""

    def measure(self, count: int) -> Iterator[Measured]:
        """Process at least `count` more trajectories and measure them."""


class Experiences:
    """Experiences with consecutive prompt numbers, in full records; `tokens`: prompt and response together."""

    def __init__(self, tokens: int) -> None:
        self.count = 0
        self._template = _template(tokens)

    def next(self) -> Block:
        """The next `MAX_ROWS` experiences, in whole groups."""
        rows = np.arange(self.count, self.count + MAX_ROWS)
        self.count += MAX_ROWS
        changed = {"trajectory.prompt.number": rows // SAMPLES, "trajectory.member": rows % SAMPLES}
        batch = self._template.batch
        for name, values in changed.items():
            batch = batch.set_column(batch.schema.get_field_index(name), name, pa.array(values, pa.int64()))
        return Block(r.Experience, batch)


class InMemory:
    """The buffer without Kafka, codec and Beam: columns of experiences in, columns of batches out."""

    def __init__(self, tokens: int, global_batch: int) -> None:
        self._experiences = Experiences(tokens)
        config = ExperienceConfig(global_batch=global_batch)
        step = MakeBatches(config, 1)
        self._pack = partial(pack_batches, budget=config.micro_batch_tokens, shares=1)
        self._buffer = step.restore(Restored("g", 1, (), {}, {}))
        self._offset = 0

    @property
    def written(self) -> int:
        return self._experiences.count

    def extend(self, length: int) -> None:
        while self.written < length:
            self._fold()

    def measure(self, count: int) -> Iterator[Measured]:
        before = self.written
        took = 0.0
        while self.written < before + count:
            took += self._fold()
        done = self.written - before
        yield Measured("fold", before, done, done / took, took / done * 1e6, 0.0)

    def _fold(self) -> float:
        """Fold one poll; return the buffer's CPU seconds."""
        first = self._offset
        self._offset += RECORDS_A_POLL
        blocks = [self._experiences.next() for _ in range(RECORDS_A_POLL)]
        received = tuple(
            ReceivedRecord(EXPERIENCES.short_name, 0, first + at, block) for at, block in enumerate(blocks)
        )
        positions = {PartitionKey(EXPERIENCES.short_name, 0): self._offset}
        began = time.process_time()
        self._pack(self._buffer.fold(Polled("g", 1, received, (), positions, True)))
        while self._buffer.busy():
            self._pack(self._buffer.fold(Polled("g", 1, (), (), positions, True)))
        self._buffer.checkpoint(positions)
        return time.process_time() - began


class OnKafka:
    """A run on Kafka: stage `write` publishes experiences, `buffer` runs the pipeline until all are batched."""

    def __init__(self, config: Config, name: str, broker: Broker, tokens: int) -> None:
        self._config = replace(config, run=replace(config.run, name=name))
        self._broker, self._process = broker, psutil.Process(broker.pid)
        self._experiences = Experiences(tokens)
        make_topics(self._config)

    @property
    def written(self) -> int:
        return self._experiences.count

    def extend(self, length: int) -> None:
        if length > self.written:
            self._write(length - self.written)
            self._drain()

    def measure(self, count: int) -> Iterator[Measured]:
        size = self._config.experience.global_batch
        # A start reads the outcomes of the last transactions, whatever the log's length: the same few at every slice.
        self.extend(self.written + size)
        start, before = self.written, self._now(0)
        self._write(count)
        yield self._between("write", start, self.written - start, before, self._now(0))
        samples = self._drain()
        batched = (samples[-1].batches - start // size) * size
        yield self._between("buffer", start, batched, samples[0], samples[-1])

    def _between(self, stage: str, log: int, count: int, first: Sample, last: Sample) -> Measured:
        own, brokers = (after - before for before, after in zip(first[2:], last[2:], strict=True))
        return Measured(stage, log, count, count / (last.at - first.at), own / count * 1e6, brokers / count * 1e6)

    def _write(self, count: int) -> None:
        topic, until = EXPERIENCES.name(self._config.run.name), self.written + count
        with BoundedProducer(self._config.kafka.client()) as producer:
            while self.written < until:
                for value, headers in encode_block(self._experiences.next()):
                    producer.send(topic, value, key=b"p", headers=headers, partition=0)

    def _drain(self) -> list[Sample]:
        """Run the pipeline until all whole batches are committed. Raises RuntimeError after `LIMIT_S`."""
        STOPPING.clear()
        watch = _Watch(self._config, self.written // self._config.experience.global_batch, self._now)
        watch.start()
        run_pipeline(partial(experience.build, config=self._config), close=close_shards)
        watch.join(10)
        if not watch.done:
            raise RuntimeError(f"the buffer committed only {watch.samples[-1].batches} batches in {LIMIT_S:g} s")
        return watch.samples

    def _now(self, batches: int) -> Sample:
        return Sample(batches, time.monotonic(), time.process_time(), sum(self._process.cpu_times()[:2]))


class Sample(NamedTuple):
    """Committed batches, and seconds: of the clock, of this process's CPU time, of the broker's."""

    batches: int
    at: float
    own: float
    brokers: float


class _Watch(threading.Thread):
    """Follows the metrics topic, which has one committed record per batch, until there are `batches`.

    It starts at the current end of the topic: reading older records would count as work of the buffer.
    """

    def __init__(self, config: Config, batches: int, now: Callable[[int], Sample]) -> None:
        super().__init__(daemon=True)
        self._config, self._batches, self._now = config, batches, now
        self._topic = METRICS.name(config.run.name)
        self._from = {number: span.end for number, span in partition_ranges(self._client, self._topic).items()}
        self.samples: list[Sample] = []
        self.done = False

    @property
    def _client(self) -> ClientProperties:
        return self._config.kafka.client()

    def run(self) -> None:
        limit = threading.Timer(LIMIT_S, STOPPING.set)
        limit.start()
        group = group_name(self._config.run.name, "experience")
        while SESSIONS.get(group) is None and not STOPPING.wait(0.002):
            pass
        self.samples.append(self._now(0))
        for record in read_topic(self._client, self._topic, start=self._from, follow=True):
            self.samples.append(self._now(1 + record.rows[-1].step))
            if self.samples[-1].batches >= self._batches:
                break
        self.done = True
        limit.cancel()
        STOPPING.set()


def example_trajectories(tokens: int) -> list[r.Trajectory]:
    """`MAX_ROWS` trajectories of the first prompts; `tokens`: prompt and response together."""
    rng = np.random.default_rng(0)
    prompt_tokens = tokens // 8
    response_tokens = tokens - prompt_tokens
    version = r.PolicyVersion(1, 0)
    sampling = r.Sampling(1.0, 1.0, 0, response_tokens, (0,), 0)
    rows = []
    for row in range(MAX_ROWS):
        ids = token_ids(rng.integers(0, 32_000, prompt_tokens).astype(np.int32))
        prompt = r.Prompt(row // SAMPLES, "train", "benchmark", "x" * 64, ids, '{"answer": "1"}', SAMPLES, sampling)
        response = r.Response(
            token_ids(rng.integers(0, 32_000, response_tokens).astype(np.int32)),
            floats(-rng.random(response_tokens, np.float32)),
            flags(np.ones(response_tokens, bool)),
        )
        spans = (r.VersionSpan(version, response_tokens),)
        rows.append(
            r.Trajectory(
                prompt, row % SAMPLES, 1, 1, 0, 1, response, "y" * 64, spans, version, "stop", None, 0, None, 0
            )
        )
    return rows


def _template(tokens: int) -> Block:
    rows = []
    for row, trajectory in enumerate(example_trajectories(tokens)):
        components = (
            r.RewardComponent("exact", float(row % 2), 1.0),
            r.RewardComponent("accuracy", float(row % 2), 0.0),
        )
        rows.append(r.Experience(trajectory, float(row % 2), components, None, 0))
    return Block.of(rows)
