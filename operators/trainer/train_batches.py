"""TrainBatches: global batches in, weight versions out. The trainer is a function of the log (invariant 6)."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from infra.models.checkpoint_folder import load_tokenizer, save_folder
from infra.store.errors import StoreError
from infra.store.publisher import PublishFailed
from operators.io.config import ShardConfig
from operators.io.elements import Checkpoint, Output, Place, Polled, Restored
from operators.trainer.assembly import BatchAssembly, WholeBatch
from operators.trainer.checkpoint import (
    CheckpointError,
    TrainerPosition,
    list_checkpoints,
    read_checkpoint,
    read_position,
    write_checkpoint,
)
from operators.trainer.learner import Learner
from operators.trainer.publishing import Publishing, WayToRelays
from operators.trainer.tensor_bytes import tensor_specs
from operators.trainer.training_config import TrainingConfig
from schemas.records import DeadLetter, Metric, MicroBatch, PolicyVersion, RelayChain, WeightVersion
from schemas.topics import BATCHES, DEAD_LETTERS, METRICS

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause before a version that did not get out is tried again."""


@dataclass(frozen=True)
class CheckpointPositions:
    """Where reading resumes after a restart: where the newest checkpoint stood, whatever the group has committed."""

    checkpoints: Path

    def __call__(self) -> dict[Place, int]:
        found = list_checkpoints(self.checkpoints)
        offsets = read_position(found[-1]).batch_offsets if found else (0,)
        return {Place(BATCHES.noun, partition): offset for partition, offset in enumerate(offsets)}


@dataclass(frozen=True)
class TrainBatches:
    """Trains `model` and publishes every version to the store in folder `store`; the epoch is this start's number.

    The last version's model is also left as a Hugging Face folder in `result`.
    """

    config: TrainingConfig
    shard: ShardConfig
    model: Path
    store: Path
    checkpoints: Path
    result: Path
    keep_versions: int
    way: WayToRelays = WayToRelays()  # noqa: RUF009 - frozen

    def resumed(self) -> ShardConfig:
        """The shard, reading on from the newest checkpoint."""
        return replace(self.shard, resume=CheckpointPositions(self.checkpoints))

    def restore(self, restored: Restored) -> _Training:
        torch.set_num_threads(self.config.threads)
        return _Training(self, restored.start)


class _Training:
    """One update a fold, so that a batch's metrics leave before the next batch is begun."""

    def __init__(
        self, step: TrainBatches, epoch: int, now: Callable[[], int] = lambda: time.time_ns() // 10**6
    ) -> None:
        self._step, self._epoch, self._now = step, epoch, now
        self._learner = Learner(step.config.learner, step.model, step.config.device)
        self._position = TrainerPosition(PolicyVersion(epoch, 0), (0,), 0)
        self._assembly = BatchAssembly()
        self._whole: deque[WholeBatch] = deque()
        self._published_before = -1
        self._unpublished: list[int] = []
        self._started = False
        self._behind = False
        """Whether the weights have moved on since the last version that went out."""
        self._retry_at = 0.0
        self._model_seconds = 0.0
        self._idle_since = time.perf_counter()
        parent = None
        if found := list_checkpoints(step.checkpoints):
            state, self._position = read_checkpoint(found[-1])
            self._learner.restore(state)
            parent = self._position.version
            log.info("resumed from checkpoint %s as epoch %d", parent, epoch)
        specs = tensor_specs(self._learner.state().weights)
        shard = step.shard
        self._publishing = Publishing(step.store, step.keep_versions, shard.client, shard.run, specs, parent, step.way)
        self._publisher = self._publishing.publisher

    def fold(self, polled: Polled) -> list[Output]:
        outputs: list[Output] = []
        for received in polled.records:
            if isinstance(received.record, WeightVersion):
                if received.record.version.epoch != self._epoch:
                    self._published_before = max([self._published_before, *received.record.batches])
            elif isinstance(received.record, RelayChain):
                self._publishing.obey(received.record)
            elif isinstance(received.record, MicroBatch):
                self._whole.extend(self._assembly.add(received.record, received.partition, received.offset))
        if not polled.caught_up:
            return outputs
        if not self._started:
            self._started = True
            if self._trained() == 0 and self._published_before < 0:
                self._let_out(must=True)
            if self._done():
                self._save_result()  # where the process died before it could
                # whoever waits for the last step may not have heard of it
                outputs.append(self._metric({"trajectories": float(self._position.trajectories_trained)}))
        if self._whole and not self._done():
            outputs += self._train(self._whole.popleft())
        elif (self._behind or self._has_failed()) and time.monotonic() >= self._retry_at:
            # Nothing to train: admission may be waiting for the very manifest that was skipped, or did not get out.
            self._retry_at = time.monotonic() + RETRY_S
            self._let_out(must=True)
        return outputs

    def checkpoint(self, positions: Mapping[Place, int]) -> Checkpoint:
        return Checkpoint({Place(BATCHES.noun, p): offset for p, offset in enumerate(self._position.batch_offsets)})

    def busy(self) -> bool:
        return bool(self._whole) and not self._done()

    def close(self) -> None:
        self._publishing.close()

    def _done(self) -> bool:
        return self._trained() >= self._step.config.optimizer_steps

    def _trained(self) -> int:
        return self._position.version.number

    def _train(self, batch: WholeBatch) -> list[Output]:
        waited, began = time.perf_counter() - self._idle_since, time.thread_time()
        try:
            values = self._learner.update(batch.parts)
        except ValueError as error:
            # Nothing of this batch can be trained; the learner is as it was, and the batch is kept whole.
            letter = DeadLetter(
                "train", str(error), BATCHES.name(self._step.shard.run), 0, batch.next_offset - 1, b"", self._now()
            )
            self._position = replace(self._position, batch_offsets=(batch.next_offset,))
            return [Output(DEAD_LETTERS, str(batch.number), letter)]
        self._model_seconds += time.thread_time() - began
        rows = sum(len(part.trajectory_ids) for part in batch.parts)
        self._position = TrainerPosition(
            PolicyVersion(self._epoch, self._trained() + 1),
            (batch.next_offset,),
            self._position.trajectories_trained + rows,
        )
        self._unpublished.append(batch.number)
        started = time.perf_counter()
        # What an earlier epoch has published already is not published again, but for the last of it.
        if batch.number >= self._published_before or self._done():
            self._let_out()
        self._idle_since = time.perf_counter()
        values |= {
            "trajectories": float(self._position.trajectories_trained),
            "time/wait": waited,
            "time/publish": self._idle_since - started,
            "cpu/model_seconds": self._model_seconds,
            "cpu/process_seconds": time.process_time(),
        }
        return [self._metric(values)]

    def _metric(self, values: dict[str, float]) -> Output:
        return Output(METRICS, "trainer", Metric("trainer", self._trained(), values, self._now()))

    def _let_out(self, *, must: bool = False) -> None:
        """Publish the weights as they are, and where a checkpoint is due wait until they are out, and write it."""
        due = self._trained() > 0 and (self._done() or self._trained() % self._step.config.checkpoint_every == 0)
        self._behind = not self._publish(must=must or due)
        if due and not self._behind:
            self._behind = not self._save()

    def _has_failed(self) -> bool:
        """Whether the version that was on its way did not get out."""
        try:
            self._publisher.flush(timeout_s=0)
        except TimeoutError:
            return False
        except PublishFailed as error:
            log.error("%s", error)
            self._behind = True
        return self._behind

    def _publish(self, *, must: bool) -> bool:
        """Let the weights go out as this position's version; False if they wait for a later one to go out with."""
        position, batches = self._position, self._unpublished
        self._unpublished = []  # the publisher keeps what no manifest has told yet
        try:
            return self._publisher.publish(
                self._learner.state().weights,
                position.version,
                step=position.version.number,
                batches=batches,
                batch_offsets=position.batch_offsets,
                trajectories_trained=position.trajectories_trained,
                final=self._done(),
                must=must,
            )
        except (PublishFailed, StoreError) as error:
            log.error("version %s did not go out, rollouts go on with the one before: %s", position.version, error)
            return False

    def _save(self) -> bool:
        """A checkpoint of a version that is out: its manifest is where the next epoch's line of ancestors goes on.

        False if the version did not get out.
        """
        step, position = self._step, self._position
        try:
            self._publisher.flush()
            kept = {"keep": step.config.checkpoints_kept, "keep_every": step.config.keep_every}
            write_checkpoint(step.checkpoints, self._learner.state(), position, **kept)
        except PublishFailed as error:
            log.error("version %s is not out yet: %s", position.version, error)
            return False
        except CheckpointError as error:
            log.error("no checkpoint of version %s: %s", position.version, error)
        if self._done():
            self._save_result()
        return True

    def _save_result(self) -> None:
        if not self._step.result.exists():  # an earlier epoch's is the same: weights are a function of the log
            save_folder(self._learner.plain_model(), load_tokenizer(self._step.model), self._step.result)
