"""TrainBatches: global batches in, weight versions out. The trainer is a function of the log (invariant 6).

With several ranks, rank 0 runs `TrainBatches`: it publishes, and its checkpoint has the whole model. Every other rank
runs `TrainFollower`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError

from infra.models.checkpoint_folder import load_tokenizer, save_folder
from infra.storage import StorageFolder
from infra.store.errors import StoreError
from infra.store.publisher import PublishFailed
from operators.io.config import ShardConfig
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, Restored
from operators.trainer.assembly import RejectedMicroBatch, WholeBatch
from operators.trainer.checkpoint import check_writable, list_checkpoints, read_position, write_checkpoint
from operators.trainer.dead_letters import dead_letters
from operators.trainer.manifest_offsets import ManifestOffsets
from operators.trainer.persist import CheckpointError, persist
from operators.trainer.publishing import Publishing, PublishSettings
from operators.trainer.rank_training import RankTraining
from operators.trainer.ranks import Ranks
from operators.trainer.rendezvous import join_process_group
from operators.trainer.tensor_bytes import tensor_specs
from operators.trainer.training_config import TrainingConfig
from schemas.records import Metric, MicroBatch, PolicyVersion, RelayChain, WeightVersion
from schemas.topics import BATCHES, METRICS, RELAY, batch_partitions

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause before a version that did not get out is tried again; twice as long after each time in vain."""
RETRY_AT_MOST_S = 16.0
_MANIFESTS = PartitionKey(RELAY.short_name, 0)


@dataclass(frozen=True)
class CheckpointPositions:
    """Where a rank resumes reading its `partitions`: where the newest checkpoint stood, whatever is committed."""

    checkpoints: StorageFolder
    partitions: Sequence[int] = (0,)

    def __call__(self) -> dict[PartitionKey, int]:
        found = list_checkpoints(self.checkpoints)
        offsets = read_position(found[-1]).batch_offsets if found else ()
        return {PartitionKey(BATCHES.short_name, p): offsets[p] if found else 0 for p in self.partitions}


@dataclass(frozen=True)
class TrainBatches:
    """Trains `model` and publishes every version to the store in folder `store`; the epoch is this start's number.

    The last version's model is also left as a Hugging Face folder in `result`. `shards` of the buffer make the batches.
    `rendezvous_file` is the file by which several ranks find each other, beside the checkpoints where it is None.
    """

    config: TrainingConfig
    shard: ShardConfig
    model: Path
    store: Path
    checkpoints: StorageFolder
    result: Path
    keep_versions: int
    publish: PublishSettings = PublishSettings()  # noqa: RUF009 - frozen
    shards: int = 1
    rendezvous_file: Path | None = None

    def resumed(self) -> ShardConfig:
        """The shard, reading on from the newest checkpoint."""
        return replace(
            self.shard, start_positions=CheckpointPositions(self.checkpoints, batch_partitions(0, self.shards))
        )

    def restore(self, restored: Restored) -> _Training:
        torch.set_num_threads(self.config.threads)
        check_writable(self.checkpoints)
        return _Training(self, restored.start, restored.state.get("published", -1))


@dataclass(frozen=True)
class TrainFollower:
    """Any rank but the first: trains its part of every batch, and lets nothing out."""

    config: TrainingConfig
    shard: ShardConfig
    model: Path
    checkpoints: StorageFolder
    rank: int
    shards: int = 1
    rendezvous_file: Path | None = None

    def resumed(self) -> ShardConfig:
        """The shard, reading on from the newest checkpoint."""
        partitions = batch_partitions(self.rank, self.shards)
        return replace(self.shard, start_positions=CheckpointPositions(self.checkpoints, partitions))

    def restore(self, restored: Restored) -> _FollowerTraining:
        torch.set_num_threads(self.config.threads)
        return _FollowerTraining(self)


class _Training:
    """One update a fold, so that a batch's metrics leave before the next batch is begun."""

    def __init__(
        self,
        step: TrainBatches,
        epoch: int,
        published: int = -1,
        now: Callable[[], int] = lambda: time.time_ns() // 10**6,
    ) -> None:
        self._step, self._epoch, self._now = step, epoch, now
        self._training = _rank_training(step, epoch, 0)
        self._published = self._published_before = published
        """The last batch that any manifest covers, and the last that one of an earlier epoch does."""
        self._manifests = ManifestOffsets(self._kept_checkpoints())
        self._unpublished: list[int] = []
        self._untrained: list[int] = []
        """Those of the unpublished batches of which nothing could be trained."""
        self._resumed: WeightVersion | None = None
        """What training goes on from, until it is known to be in the store: a machine loses that with its memory."""
        self._started = False
        self._behind = False
        """Whether the weights have moved on since the last version that went out."""
        self._retry_at = self._pause = 0.0
        self._model_seconds = 0.0
        self._idle_since = time.perf_counter()
        shard, parent = step.shard, self._training.resumed_from
        specs = tensor_specs(self._training.weights)
        self._publishing = Publishing(
            step.store, step.keep_versions, shard.client, shard.run, specs, parent, step.publish
        )
        self._publisher = self._publishing.publisher

    def fold(self, polled: Polled) -> list[Output]:
        outputs: list[Output] = []
        for received in polled.records:
            if isinstance(received.record, WeightVersion):
                self._manifests.add(received.record.version, received.offset)
                self._published = max([self._published, *received.record.batches])
                if received.record.version.epoch != self._epoch:
                    self._published_before = max([self._published_before, *received.record.batches])
                if received.record.version == self._training.resumed_from:
                    self._resumed = received.record
            elif isinstance(received.record, RelayChain):
                self._publishing.obey(received.record)
            elif isinstance(received.record, MicroBatch):
                self._training.take(received.record, received.partition, received.offset)
        outputs += dead_letters(self._training.rejected(), self._step.shard.run, self._now())
        if not polled.caught_up:
            return outputs
        if not self._started:
            self._started = True
            if self._training.trained == 0 and self._published_before < 0:
                self._let_out(must=True)
            self._put_back()
            if self._training.done:
                self._save_result()  # where the process died before it could
                # whoever waits for the last step may not have heard of it
                outputs.append(self._metric({"trajectories": float(self._training.position.trajectories_trained)}))
        if (batch := self._training.waiting) is not None:
            outputs += self._train(batch)
            return outputs
        self._training.check()
        behind = self._behind or self._has_failed()
        if (behind or self._resumed) and time.monotonic() >= self._retry_at:
            # Nothing to train: admission may be waiting for the very manifest that was skipped, or did not get out.
            self._pause = min(max(RETRY_S, 2 * self._pause), RETRY_AT_MOST_S)
            self._retry_at = time.monotonic() + self._pause
            self._put_back()
            if behind:
                self._let_out(must=True)
        return outputs

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        manifests = {place: self._manifests.low_water(at) for place, at in positions.items() if place == _MANIFESTS}
        return Checkpoint({**self._training.offsets(), **manifests}, state={"published": self._published})

    def busy(self) -> bool:
        return self._training.waiting is not None

    def close(self) -> None:
        self._publishing.close()

    def _kept_checkpoints(self) -> list[PolicyVersion]:
        newest = list_checkpoints(self._step.checkpoints)[-self._step.config.checkpoints_kept :]
        return [PolicyVersion.parse(folder.name) for folder in newest]

    def _train(self, batch: WholeBatch) -> list[Output]:
        waited, began = time.perf_counter() - self._idle_since, time.thread_time()
        outputs: list[Output] = []
        try:
            values = self._training.train()
        except ValueError as error:
            # The learner is as it was, and the batch is kept whole. It makes a version all the same: placement waits
            # for one that names it before it admits more.
            log.error("batch %d cannot be trained: %s", batch.number, error)
            values = {"batches/untrained": 1.0, "time/update": 0.0}
            self._untrained.append(batch.number)
            if batch.parts:
                rejected = RejectedMicroBatch(0, batch.next_offsets[0] - 1, str(error))
                outputs += dead_letters([rejected], self._step.shard.run, self._now())
        self._model_seconds += time.thread_time() - began
        self._resumed = None  # the newest version is another now
        self._unpublished.append(batch.number)
        started = time.perf_counter()
        # What an earlier epoch has published already is not published again, but for the last of it.
        if batch.number >= self._published_before or self._training.done:
            self._let_out()
        self._idle_since = time.perf_counter()
        synced = self._idle_since - started
        values |= {
            "trajectories": float(self._training.position.trajectories_trained),
            "time/wait": waited,
            "trainer/idle_ratio": waited / (waited + values["time/update"] + synced),
            "weight_sync/seconds": synced,
            "queue/lag": float(self._training.lag),
            "cpu/model_seconds": self._model_seconds,
            "cpu/process_seconds": time.process_time(),
        }
        return [*outputs, self._metric(values)]

    def _metric(self, values: dict[str, float]) -> Output:
        return Output(METRICS, "trainer", Metric("trainer", self._training.trained, values, self._now()))

    def _let_out(self, *, must: bool = False) -> None:
        """Publish the weights as they are, and where a checkpoint is due wait until they are out, and write it."""
        due = self._training.due
        self._behind = not self._publish(must=must or due)
        if due and not self._behind:
            self._behind = not self._save()
        if not self._behind:
            self._pause = 0.0

    def _put_back(self) -> None:
        """See to it that rollouts find what training goes on from: there may be no batch until they have it."""
        if (resumed := self._resumed) is None:
            return
        try:
            self._publishing.restore_version(self._training.weights, resumed)
            self._resumed = None
        except StoreError as error:
            log.error("version %s is not in the store: %s", resumed.version, error)

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
        position, batches, untrained = self._training.position, self._unpublished, self._untrained
        self._unpublished, self._untrained = [], []  # the publisher keeps what no manifest has told yet
        try:
            return self._publisher.publish(
                self._training.weights,
                position.version,
                step=position.version.number,
                batches=batches,
                untrained=untrained,
                batch_offsets=position.batch_offsets,
                trajectories_trained=position.trajectories_trained,
                final=self._training.done,
                wait_for_previous=must,
            )
        except (PublishFailed, StoreError) as error:
            log.error("version %s did not go out, rollouts go on with the one before: %s", position.version, error)
            return False

    def _save(self) -> bool:
        """A checkpoint of a version that is out: its manifest is where the next epoch's line of ancestors goes on.

        False if the version did not get out. Raises CheckpointError where the checkpoint cannot be written.
        """
        step, position, state = self._step, self._training.position, self._training.state
        assert state is not None  # a checkpoint is due
        try:
            self._publisher.flush()
        except PublishFailed as error:
            log.error("version %s is not out yet: %s", position.version, error)
            return False
        kept = {"keep": step.config.checkpoints_kept, "keep_every": step.config.keep_every}
        persist(lambda: write_checkpoint(step.checkpoints, state, position, **kept), step.config.checkpoint_tries)
        self._manifests.keep(self._kept_checkpoints())
        if self._training.done:
            self._save_result()
        return True

    def _save_result(self) -> None:
        if not self._step.result.exists():  # an earlier epoch's is the same: weights are a function of the log
            persist(self._write_result, self._step.config.checkpoint_tries)

    def _write_result(self) -> None:
        result = self._step.result
        try:
            save_folder(self._training.plain_model(), load_tokenizer(self._step.model), result)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot write the final model to {result.absolute()}: {error}") from error


class _FollowerTraining:
    """What rank 0 does, but for all that others hear of."""

    def __init__(self, step: TrainFollower) -> None:
        self._training, self._run = _rank_training(step, 0, step.rank), step.shard.run

    def fold(self, polled: Polled) -> list[Output]:
        for received in polled.records:
            if isinstance(received.record, MicroBatch):
                self._training.take(received.record, received.partition, received.offset)
        outputs = dead_letters(self._training.rejected(), self._run, time.time_ns() // 10**6)
        if not polled.caught_up:
            return outputs
        if self._training.waiting is None:
            self._training.check()
            return outputs
        try:
            self._training.train()
        except ValueError as error:
            log.error("a batch cannot be trained: %s", error)  # rank 0 writes the dead letter
        return outputs

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        return Checkpoint(self._training.offsets())

    def busy(self) -> bool:
        return self._training.waiting is not None

    def close(self) -> None:
        pass


def _rank_training(step: TrainBatches | TrainFollower, epoch: int, rank: int) -> RankTraining:
    """The training of `rank`, once all ranks are there; each of them begins with the newest checkpoint."""
    config, file = step.config, step.rendezvous_file
    if file is None:
        assert isinstance(step.checkpoints, Path)  # elsewhere ranks could not meet
        file = step.checkpoints / "ranks.json"
    rendezvous = join_process_group(file, Ranks(rank, config.ranks), config.rank_0_host, config.device_of(rank))
    return RankTraining(config, step.model, step.checkpoints, epoch, rendezvous, step.shards)
