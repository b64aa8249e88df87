"""EmulateTraining: global batches in, manifests of weight versions out, in the time that training them would take.

It keeps the trainer's rules: a start is an epoch; it restores from its checkpoint alone, trains again what came after,
and of what an earlier epoch published already publishes only the last. Its checkpoint is where its reading stood, which
is small enough to travel in the commit's note.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from infra.kafka.producer import BoundedProducer, DeliveryFailed
from infra.store.announce import ManifestLog
from operators.io.config import ShardConfig
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, Restored
from operators.trainer.assembly import BatchAssembly, RejectedMicroBatch, WholeBatch
from operators.trainer.batch_statistics import batch_statistics
from operators.trainer.dead_letters import dead_letters
from operators.trainer.training_config import TrainingConfig
from schemas.records import Metric, MicroBatch, PolicyVersion, WeightVersion
from schemas.topics import BATCHES, METRICS, RELAY

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause before a manifest that did not get out is tried again."""


@dataclass(frozen=True)
class EmulateTraining:
    """Trains nothing, `time_scale` times as fast as `config.emulation` says; a token stands for `stride` real ones.
    `shards` of the buffer make the batches.
    """

    config: TrainingConfig
    shard: ShardConfig
    time_scale: float = 1.0
    stride: int = 1
    shards: int = 1

    def restore(self, restored: Restored) -> _Emulating:
        producer = BoundedProducer(self.shard.client)
        return _Emulating(self, restored, ManifestLog(producer, self.shard.run), lambda: _close(producer))


@dataclass(frozen=True, slots=True)
class _Position:
    """How far training is: version `number`, the next batch's offsets, trajectories so far, the version published."""

    offsets: tuple[int, ...]
    number: int = 0
    trajectories: int = 0
    published: str = ""


@dataclass(frozen=True, slots=True)
class _Step:
    """A batch under way, from `began` to `ends` by the clock; `waited` seconds before."""

    batch: WholeBatch
    began: float
    ends: float
    waited: float


class _Emulating:
    def __init__(
        self,
        step: EmulateTraining,
        restored: Restored,
        announce: Callable[[WeightVersion], None],
        let_go: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], int] = lambda: time.time_ns() // 10**6,
    ) -> None:
        self._step, self._epoch, self._announce = step, restored.start, announce
        self._let_go, self._clock, self._now = let_go, clock, now
        self._saved = self._position = _position(restored.state.get("trained", {}), step.shards)
        position = self._position
        self._assembly = BatchAssembly(
            range(step.shards),
            shards=step.shards,
            first=position.number,
            lost=step.config.lost_batches,
            starts=position.offsets,
        )
        self._whole = deque((self._clock(), batch) for batch in self._assembly.take())
        self._missing_since: float | None = None
        self._training: _Step | None = None
        self._free_at = 0.0
        """When the trainer can begin the next batch."""
        self._untold: list[int] = []
        self._untrained: list[int] = []
        self._leaving: deque[tuple[float, WeightVersion, _Position]] = deque()
        """Versions on their way, when they arrive, and what there was to save with them."""
        self._held: list[Output] = []
        self._published = restored.state.get("published", -1)
        """The last batch that any manifest covers, of this epoch too."""
        self._published_before = self._published
        self._started = False

    def fold(self, polled: Polled) -> list[Output]:
        now = self._clock()
        for received in polled.records:
            if isinstance(received.record, WeightVersion):
                self._published = max([self._published, *received.record.batches])
                if received.record.version.epoch != self._epoch:
                    self._published_before = max([self._published_before, *received.record.batches])
            elif isinstance(received.record, MicroBatch):
                whole = self._assembly.add(received.record, received.partition, received.offset)
                self._whole.extend((now, batch) for batch in whole)
        rejected, self._assembly.rejected = self._assembly.rejected, []
        outputs = dead_letters(rejected, self._step.shard.run, self._now())
        if not polled.caught_up:
            return outputs
        if not self._started:
            outputs += self._start(now)
        while (step := self._training or self._begin()) is not None and step.ends <= now:
            outputs += self._finish(step)
        if self._training is None:
            self._check(now)
        self._let_out(now)
        if self._done() and self._leaving:
            self._held += outputs  # a run that hears of its last step ends: the version must be out by then
            return []
        held, self._held = self._held, []
        return held + outputs

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        saved = self._saved
        places = {PartitionKey(BATCHES.short_name, partition): offset for partition, offset in enumerate(saved.offsets)}
        places |= {place: offset for place, offset in positions.items() if place.topic == RELAY.short_name}
        return Checkpoint(places, state={"trained": asdict(saved), "published": self._published})

    def busy(self) -> bool:
        return False

    def close(self) -> None:
        self._let_go()

    def _start(self, now: float) -> list[Output]:
        self._started, self._free_at = True, now
        if self._position.number == 0 and self._published_before < 0:
            self._publish(now)
        if not self._done():
            return []
        # whoever waits for the last step may not have heard of it
        return [self._metric({"trajectories": float(self._position.trajectories)})]

    def _done(self) -> bool:
        return self._position.number >= self._step.config.optimizer_steps

    def _begin(self) -> _Step | None:
        """Take the next batch up, as of when it was there and the trainer free."""
        if not self._whole or self._done():
            return None
        seen, batch = self._whole.popleft()
        began = max(seen, self._free_at)
        tokens = self._step.stride * sum(len(part.token_ids) for part in batch.parts)
        ends = began + self._step.config.emulation.seconds(tokens) / self._step.time_scale
        self._training = _Step(batch, began, ends, began - self._free_at)
        return self._training

    def _check(self, now: float) -> None:
        """Raise MissingBatch where the next batch is missing in the log, and does not come."""
        missing = None if self._done() else self._assembly.missing()
        if missing is None:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = now
            log.warning("%s", missing)
        elif now - self._missing_since >= self._step.config.missing_batch_wait_s:
            raise missing

    def _finish(self, step: _Step) -> list[Output]:
        batch, scale, emulation = step.batch, self._step.time_scale, self._step.config.emulation
        self._training = None
        outputs: list[Output] = []
        rows, figures = 0, {"batches/untrained": 1.0}
        try:
            figures = batch_statistics(batch.parts)
            rows = sum(len(part.trajectory_ids) for part in batch.parts)
        except ValueError as error:
            self._untrained.append(batch.number)
            if batch.parts:
                outputs = dead_letters(
                    [RejectedMicroBatch(0, batch.next_offsets[0] - 1, str(error))], self._step.shard.run, self._now()
                )
        before = self._position
        self._position = replace(
            before, number=before.number + 1, offsets=batch.next_offsets, trajectories=before.trajectories + rows
        )
        self._free_at = step.ends + emulation.stall_s / scale
        self._untold.append(batch.number)
        if batch.number >= self._published_before or self._done():
            self._publish(self._free_at + emulation.broadcast_s / scale)
        told = self._metric(
            {
                **figures,
                "trajectories": float(self._position.trajectories),
                "time/update": step.ends - step.began,
                "time/wait": step.waited,
                "trainer/idle_ratio": step.waited / (step.waited + step.ends - step.began + emulation.stall_s / scale),
                "weight_sync/seconds": emulation.stall_s / scale,
                "queue/lag": float(len(self._whole)),
            }
        )
        return [*outputs, told]

    def _publish(self, arrives: float) -> None:
        """Send the version trained last on its way."""
        position, version = self._position, PolicyVersion(self._epoch, self._position.number)
        manifest = WeightVersion(
            version=version,
            parent=PolicyVersion.parse(position.published) if position.published else None,
            step=position.number,
            file="",
            bytes=0,
            blake3="",
            tensors=(),
            batches=tuple(self._untold),
            batch_offsets=position.offsets,
            trajectories_trained=position.trajectories,
            final=self._done() and position.number > 0,
            created_at=self._now(),
            untrained_batches=tuple(self._untrained),
        )
        self._untold, self._untrained = [], []
        self._position = replace(position, published=str(version))
        self._leaving.append((arrives, manifest, self._position))

    def _let_out(self, now: float) -> None:
        """Tell of versions that have arrived, and save where one is due."""
        every = self._step.config.checkpoint_every
        while self._leaving and self._leaving[0][0] <= now:
            _, manifest, position = self._leaving[0]
            try:
                self._announce(manifest)
            except (DeliveryFailed, TimeoutError) as error:
                log.error("version %s is not out yet: %s", manifest.version, error)
                self._leaving[0] = (now + RETRY_S, manifest, position)
                return
            self._leaving.popleft()
            if position.number % every == 0 or manifest.final:
                self._saved = position

    def _metric(self, values: dict[str, float]) -> Output:
        return Output(METRICS, "trainer", Metric("trainer", self._position.number, values, self._now()))


def _position(state: Mapping[str, Any], shards: int) -> _Position:
    return _Position(**{**state, "offsets": tuple(state.get("offsets", (0,) * shards))})


def _close(producer: Any) -> None:
    try:
        producer.close(timeout_s=2)
    except (DeliveryFailed, TimeoutError) as error:
        log.error("a manifest may not be in the log: %s", error)
