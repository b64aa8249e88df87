"""EmulateTraining: consumes global batches and publishes weight manifests after the time that training would take.

It follows the trainer's rules: each start is an epoch; it restores from its checkpoint alone and retrains the later
batches; of the versions that an earlier epoch has already published, it publishes only the last again. Its checkpoint
is its read position, small enough for the commit note.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from infra.clocks import wall_ms
from infra.kafka.note import uncommitted_consumer
from infra.kafka.producer import BoundedProducer, DeliveryFailed
from infra.kafka.role_notes import NO_NOTES, ReadNotes, notes_reader
from infra.runners.step_metrics import phase
from infra.store.announce import ManifestLog, close_manifest_producer
from operators.io.config import ShardConfig
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, Restored, ShardFold
from operators.trainer.assembly import BatchAssembly, RejectedMicroBatch, WholeBatch, dead_letters, empty_reason
from operators.trainer.manifest_history import PublishedBatches
from operators.trainer.missing_batch import MissingBatchWatch
from operators.trainer.training_config import TrainingConfig
from schemas.records import Metric, MicroBatch, PolicyVersion, WeightVersion
from schemas.topics import BATCHES, METRICS, RELAY

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause before the publish of a manifest is retried."""


@dataclass(frozen=True)
class EmulateTraining:
    """Emulates training, `time_scale` times as fast as `config.emulation`; one token stands for `stride` real tokens.
    `divisions` is the number of parts of a batch, see BufferLayout.
    """

    config: TrainingConfig
    shard: ShardConfig
    time_scale: float = 1.0
    stride: int = 1
    divisions: int = 1

    def restore(
        self,
        restored: Restored,
        producer: BoundedProducer | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], int] = wall_ms,
        announce: Callable[[WeightVersion], None] | None = None,
        notes: ReadNotes | None = None,
    ) -> _EmulatedTraining:
        """`announce` publishes a version; by default its manifest is written with `producer`. `notes` reads the commit
        notes of the run."""
        notes = notes or notes_reader(self.shard.run, lambda: uncommitted_consumer(self.shard.client))
        if announce is not None:
            return _EmulatedTraining(self, restored, announce, clock=clock, now=now, notes=notes)
        manifests = producer or BoundedProducer(self.shard.client)
        record = ManifestLog(manifests, self.shard.run)
        return _EmulatedTraining(self, restored, record, lambda: close_manifest_producer(manifests), clock, now, notes)


@dataclass(frozen=True, slots=True)
class _Position:
    """Progress: version `number`, the next batch's offsets, trajectories so far, and the version published last."""

    offsets: tuple[int, ...]
    number: int = 0
    trajectories: int = 0
    published: str = ""


@dataclass(frozen=True, slots=True)
class _Step:
    """A batch in training from `begins` to `ends` on the clock, after `waited` idle seconds."""

    batch: WholeBatch
    begins: float
    ends: float
    waited: float


class _EmulatedTraining(ShardFold):
    def __init__(
        self,
        step: EmulateTraining,
        restored: Restored,
        announce: Callable[[WeightVersion], None],
        close_producer: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], int] = wall_ms,
        notes: ReadNotes = NO_NOTES,
    ) -> None:
        self._step, self._epoch, self._announce = step, restored.start, announce
        self._close_producer, self._clock, self._now = close_producer, clock, now
        self._saved = self._position = _position(restored.state.get("trained", {}), step.divisions)
        position = self._position
        self._assembly = BatchAssembly(
            range(step.divisions),
            divisions=step.divisions,
            first=position.number,
            lost=step.config.lost_batches,
            starts=position.offsets,
        )
        self._complete = deque((self._clock(), batch) for batch in self._assembly.take())
        self._missing = MissingBatchWatch(self._assembly, step.config.missing_batch_wait_s, notes)
        self._training: _Step | None = None
        self._free_at = 0.0
        """Earliest time at which the trainer can begin the next batch."""
        self._unpublished: list[int] = []
        self._untrained: list[int] = []
        self._in_transit: deque[tuple[float, WeightVersion, _Position]] = deque()
        """Versions in transit: their arrival times, manifests, and the positions to save."""
        self._held: list[Output] = []
        self._published = PublishedBatches(self._epoch, restored.state.get("published", -1))
        self._started = False

    def fold(self, polled: Polled) -> list[Output]:
        now = self._clock()
        with phase("assemble batches"):
            for received in polled.records:
                if isinstance(received.record, WeightVersion):
                    self._published.add(received.record)
                elif isinstance(received.record, MicroBatch):
                    whole = self._assembly.add(received.record, received.partition, received.offset)
                    self._complete.extend((now, batch) for batch in whole)
        rejected, self._assembly.rejected = self._assembly.rejected, []
        outputs = dead_letters(rejected, self._now())
        if not polled.caught_up:
            return outputs
        if not self._started:
            outputs += self._start(now)
        with phase("update"):
            while (step := self._training or self._begin_step()) is not None and step.ends <= now:
                outputs += self._finish_step(step)
        if self._training is None and not self._is_done():
            self._missing.check(now)
        with phase("publish"):
            self._publish_arrived(now)
        if self._is_done() and self._in_transit:
            self._held += outputs  # the last step's metric ends the run: the version must be published before
            return []
        held, self._held = self._held, []
        return held + outputs

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        offsets = {
            PartitionKey(BATCHES.short_name, number): offset for number, offset in enumerate(self._saved.offsets)
        }
        offsets |= {key: offset for key, offset in positions.items() if key.topic == RELAY.short_name}
        return Checkpoint(offsets, state={"trained": asdict(self._saved), "published": self._published.last})

    def close(self) -> None:
        self._close_producer()

    def _start(self, now: float) -> list[Output]:
        self._started, self._free_at = True, now
        if self._position.number == 0 and self._published.last_before_epoch < 0:
            self._send(now)
        if not self._is_done():
            return []
        # an earlier start may not have committed the metric of the last step
        return [self._metric({"trajectories": float(self._position.trajectories)})]

    def _is_done(self) -> bool:
        return self._position.number >= self._step.config.optimizer_steps

    def _begin_step(self) -> _Step | None:
        """Begin the next batch, at the time when both the batch and the trainer were available."""
        if not self._complete or self._is_done():
            return None
        available_at, batch = self._complete.popleft()
        begins = max(available_at, self._free_at)
        tokens = self._step.stride * sum(len(part.token_ids) for part in batch.parts)
        emulation = self._step.config.emulation
        ends = begins + emulation.factor(batch.number) * emulation.seconds(tokens) / self._step.time_scale
        self._training = _Step(batch, begins, ends, begins - self._free_at)
        return self._training

    def _finish_step(self, step: _Step) -> list[Output]:
        batch, scale, emulation = step.batch, self._step.time_scale, self._step.config.emulation
        self._training = None
        outputs: list[Output] = []
        rows, statistics = 0, {"batches/untrained": 1.0}
        try:
            statistics = batch_statistics(batch.parts)
            rows = sum(len(part.trajectory_ids) for part in batch.parts)
        except ValueError as error:
            self._untrained.append(batch.number)
            if batch.parts:
                rejected = RejectedMicroBatch(0, batch.next_offsets[0] - 1, str(error))
                outputs = dead_letters([rejected], self._now())
        before = self._position
        self._position = replace(
            before, number=before.number + 1, offsets=batch.next_offsets, trajectories=before.trajectories + rows
        )
        self._free_at = step.ends + emulation.stall_s / scale
        self._unpublished.append(batch.number)
        if batch.number >= self._published.last_before_epoch or self._is_done():
            self._send(self._free_at + emulation.broadcast_s / scale)
        metric = self._metric(
            {
                **statistics,
                "trajectories": float(self._position.trajectories),
                "time/update": step.ends - step.begins,
                "time/wait": step.waited,
                "trainer/idle_ratio": step.waited / (step.waited + step.ends - step.begins + emulation.stall_s / scale),
                "weight_sync/seconds": emulation.stall_s / scale,
                "queue/lag": float(len(self._complete)),
            }
        )
        return [*outputs, metric]

    def _send(self, arrives: float) -> None:
        """Send the version trained last; it arrives at `arrives`."""
        position, version = self._position, PolicyVersion(self._epoch, self._position.number)
        manifest = WeightVersion(
            version=version,
            parent=PolicyVersion.parse(position.published) if position.published else None,
            step=position.number,
            file="",
            bytes=0,
            blake3="",
            tensors=(),
            batches=tuple(self._unpublished),
            batch_offsets=position.offsets,
            trajectories_trained=position.trajectories,
            final=self._is_done() and position.number > 0,
            created_at=self._now(),
            untrained_batches=tuple(self._untrained),
        )
        self._unpublished, self._untrained = [], []
        self._position = replace(position, published=str(version))
        self._in_transit.append((arrives, manifest, self._position))

    def _publish_arrived(self, now: float) -> None:
        """Publish the manifests of versions that have arrived, and save the position if a checkpoint is due."""
        every = self._step.config.checkpoint_every
        while self._in_transit and self._in_transit[0][0] <= now:
            _, manifest, position = self._in_transit[0]
            try:
                self._announce(manifest)
            except (DeliveryFailed, TimeoutError) as error:
                log.error("cannot publish version %s yet, retrying: %s", manifest.version, error)
                self._in_transit[0] = (now + RETRY_S, manifest, position)
                return
            self._in_transit.popleft()
            if position.number % every == 0 or manifest.final:
                self._saved = position

    def _metric(self, values: dict[str, float]) -> Output:
        return Output(METRICS, "trainer", Metric("trainer", self._position.number, values, self._now()))


def _position(state: Mapping[str, Any], divisions: int) -> _Position:
    return _Position(**{**state, "offsets": tuple(state.get("offsets", (0,) * divisions))})


def batch_statistics(parts: Sequence[MicroBatch]) -> dict[str, float]:
    """Statistics of reward, response length and staleness over `parts`, and their tokens, prompts included.

    Raises ValueError if the parts have no trajectory, or columns whose lengths disagree.
    """
    rows = sum(len(part.trajectory_ids) for part in parts)
    if not rows:
        raise ValueError(empty_reason(parts))
    for name in ("rewards", "lengths", "prompt_lengths", "staleness"):
        if (count := sum(len(getattr(part, name)) for part in parts)) != rows:
            raise ValueError(f"the batch has {rows} trajectories, but {count} {name}")
    rewards = np.concatenate([part.rewards.to_numpy() for part in parts])
    lengths = np.concatenate([part.lengths.to_numpy() - part.prompt_lengths.to_numpy() for part in parts])
    staleness = np.concatenate([part.staleness.to_numpy() for part in parts])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "staleness/mean": float(staleness.mean()),
        "staleness/max": float(staleness.max()),
        "tokens": float(sum(len(part.token_ids) for part in parts)),
    }
