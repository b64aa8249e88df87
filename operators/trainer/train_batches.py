"""TrainBatches: consumes global batches, publishes weight versions; a function of the log (invariant 6).

Each batch is assembled from its parts, trained, published as a version, and checkpointed if one is due. With several
ranks, rank 0 runs `TrainBatches`: it publishes, and completes the checkpoints, of which every rank writes its part.
Every other rank runs `TrainFollower`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError

from infra.models.dtypes import tensor_specs
from infra.runners.step_metrics import phase
from infra.storage import StorageFolder
from operators.io.config import ShardConfig
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, Restored
from operators.trainer.assembly import RejectedMicroBatch, WholeBatch, dead_letters
from operators.trainer.checkpoint import CheckpointPositions
from operators.trainer.checkpoint_writer import CheckpointWriter
from operators.trainer.clean_stop import fold_with_ranks, keep_newest
from operators.trainer.manifest_history import ManifestOffsets, PublishedBatches
from operators.trainer.metrics import finite
from operators.trainer.persist import CheckpointError
from operators.trainer.publishing import Publishing, PublishSettings
from operators.trainer.rank_services import PROCESS, RankServices
from operators.trainer.rank_training import RankTraining, start_rank_training
from operators.trainer.training_config import TrainingConfig
from operators.trainer.version_publisher import VersionPublisher
from schemas.records import Metric, MicroBatch, RelayChain, WeightVersion
from schemas.topics import METRICS, RELAY

log = logging.getLogger(__name__)

STOP_FLUSH_S = 5.0
"""How long a clean stop waits for the version in transit, before it makes a checkpoint of it."""

_MANIFESTS = PartitionKey(RELAY.short_name, 0)


@dataclass(frozen=True)
class TrainBatches:
    """Trains `model` and publishes every version to the store in folder `store`; the epoch is this start's number.

    The final model is also written as a Hugging Face folder to `result`. Each share of a batch has `divisions` parts
    (see BufferLayout). Weights are published in `dtype`, that of the rollouts. Metrics share a transaction with those
    of the next `metrics_s` seconds. Memory is planned for sequences of `longest` tokens.
    """

    config: TrainingConfig
    shard: ShardConfig
    model: Path
    store: Path
    checkpoints: StorageFolder
    result: Path
    keep_versions: int
    publish: PublishSettings = PublishSettings()  # noqa: RUF009 - frozen
    divisions: int = 1
    dtype: str = "float32"
    metrics_s: float = 1.0
    longest: int = 0

    def resumed(self) -> ShardConfig:
        """The shard, which reads from the newest checkpoint on."""
        partitions = self.config.partitions_of(0, self.divisions)
        positions = CheckpointPositions(self.checkpoints, partitions, self.config.checkpoint_tries)
        return replace(self.shard, start_positions=positions)

    def restore(self, restored: Restored, services: RankServices = PROCESS) -> _Training:
        torch.set_num_threads(self.config.threads)
        return _Training(self, restored.start, restored.state.get("published", -1), services)


class _Training:
    """One update per fold, so that a batch's metrics can be written before the next batch begins."""

    def __init__(self, step: TrainBatches, epoch: int, published: int, services: RankServices) -> None:
        self._step, self._services, self._clock = step, services, services.system.monotonic
        client, run = step.shard.client, step.shard.run
        addresses, notes = services.addresses(client, run), services.role_notes(client, run)
        self._training = start_rank_training(
            *(step.config, step.model, step.checkpoints, 0, epoch, step.divisions, addresses, notes),
            *(step.dtype, step.longest, services),
        )
        self._checkpoints = CheckpointWriter(step.config, self._training, step.checkpoints)
        self._result = FinalModel(self._training, step.model, step.result, step.config.checkpoint_tries)
        self._published = PublishedBatches(epoch, published)
        self._manifests = ManifestOffsets(services.persist(self._checkpoints.kept, step.config.checkpoint_tries))
        shard, parent = step.shard, self._training.resumed_from
        specs = tensor_specs(self._training.joint.rounded.specs())
        self._publishing = Publishing(
            services.weight_store(step.store, step.keep_versions),
            lambda: services.producer(shard.client),
            *(shard.run, specs, parent, step.publish),
            host=services.host,
            now=services.unix_ms,
            system=services.system,
        )
        self._versions = VersionPublisher(self._publishing, self._training)
        self._started = False
        self._model_seconds = 0.0
        self._idle_since = self._clock()
        self._held: list[Output] = []
        self._released_at = -math.inf
        self._covered = False
        """Whether a checkpoint may cover the batch of a metric that is held."""

    def fold(self, polled: Polled) -> list[Output]:
        return self._released(fold_with_ranks(self._training, lambda: self._fold(polled)), polled.last)

    def _released(self, outputs: list[Output], last: bool) -> list[Output]:
        """`outputs`, with the metrics that were held back, or nothing while metrics alone wait for more of them.

        Only metrics of batches that a restart would train again wait, so that none is lost.
        """
        self._held += outputs
        now = self._clock()
        due = last or self._covered or now - self._released_at >= self._step.metrics_s
        if not due and all(output.topic is METRICS for output in self._held):
            return []
        released, self._held = self._held, []
        if released:
            self._released_at, self._covered = now, False
        return released

    def _fold(self, polled: Polled) -> list[Output]:
        with phase("assemble batches"):
            outputs = self._assemble(polled)
        if self._checkpoints.finished():
            self._keep_manifests()
        if not polled.caught_up:
            return outputs
        if not self._started:
            outputs += self._start()
        if (batch := self._training.next_batch) is not None:
            return [*outputs, *self._train(batch)]
        self._training.check()
        if self._versions.retry_due():
            # Admission may be waiting for the very manifest that was skipped or failed.
            self._versions.restore_resumed()
            if self._versions.behind:
                with phase("publish"):
                    self._publish(wait_for_previous=True)
        return outputs

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        manifests = {key: self._manifests.low_water(offset) for key, offset in positions.items() if key == _MANIFESTS}
        return Checkpoint({**self._training.offsets(), **manifests}, state={"published": self._published.last})

    def busy(self) -> bool:
        return self._training.next_batch is not None

    def close(self) -> None:
        if self._services.stopping.is_set():
            keep_newest(self._training, self._checkpoints, self._is_published)
        self._checkpoints.close()
        self._publishing.close()
        self._training.joint.close()

    def _assemble(self, polled: Polled) -> list[Output]:
        """Assemble batches from `polled`, record manifests and the relay chain, and return dead letters."""
        for received in polled.records:
            record = received.record
            if isinstance(record, MicroBatch):
                self._training.add_part(record, received.partition, received.offset)
            elif isinstance(record, WeightVersion):
                self._published.add(record)
                self._manifests.add(record.version, received.offset)
                self._versions.add_manifest(record)
            elif isinstance(record, RelayChain):
                self._publishing.set_chain(record)
        return dead_letters(self._training.take_rejected(), self._services.unix_ms())

    def _start(self) -> list[Output]:
        """Do, once the log is read, what an earlier start did not: publish, restore, write the final model."""
        self._started = True
        self._versions.restore_resumed()  # before newer versions: a store takes versions in ascending order
        if self._versions.behind or (self._training.trained == 0 and self._published.last_before_epoch < 0):
            with phase("publish"):
                self._publish(wait_for_previous=True)
        if not self._training.done:
            return []
        self._covered = True
        self._result.write()
        # The earlier start may not have committed the metric of the last step.
        return [self._metric({"trajectories": float(self._training.position.trajectories_trained)})]

    def _train(self, batch: WholeBatch) -> list[Output]:
        """Train `batch`, publish its version, and return dead letters and the metric."""
        waited = self._clock() - self._idle_since
        values, outputs = self._update(batch)
        waited_to_write = self._training.joint.take_waited()  # for the version before
        values["time/update"] -= waited_to_write
        self._covered = self._covered or self._training.checkpoint_due
        began = self._clock()
        with phase("publish"):
            # Versions that an earlier epoch has published are not published again, except the last of them.
            if batch.number >= self._published.last_before_epoch or self._training.done:
                self._publish()
            self._training.joint.proceed()
        self._idle_since = self._clock()
        synced = self._idle_since - began + waited_to_write
        values |= {
            "trajectories": float(self._training.position.trajectories_trained),
            "time/wait": waited,
            "trainer/idle_ratio": waited / (waited + values["time/update"] + synced),
            "weight_sync/seconds": synced,
            "queue/lag": float(self._training.lag),
            "cpu/model_seconds": self._model_seconds,
            "cpu/process_seconds": self._services.process_seconds(),
        }
        return [*outputs, self._metric(values)]

    def _update(self, batch: WholeBatch) -> tuple[dict[str, float], list[Output]]:
        """Train `batch`; return metrics, and a dead letter if it cannot be trained.

        A batch that cannot be trained leaves the learner unchanged, but makes a version: placement waits for a version
        that names the batch before it admits more.
        """
        started = self._services.thread_seconds()
        outputs: list[Output] = []
        try:
            values = self._training.train()
        except ValueError as error:
            log.error("batch %d cannot be trained: %s", batch.number, error)
            values = {"batches/untrained": 1.0, "time/update": 0.0}
            if batch.parts:
                rejected = RejectedMicroBatch(0, batch.next_offsets[0] - 1, str(error))
                outputs += dead_letters([rejected], self._services.unix_ms())
        self._training.joint.after_training()
        self._model_seconds += self._services.thread_seconds() - started
        self._versions.add_batch(batch.number, trained="batches/untrained" not in values)
        return values, outputs

    def _publish(self, *, wait_for_previous: bool = False) -> None:
        """Publish the current version, and write its checkpoint if one is due.

        Only published versions are checkpointed: the next epoch's first manifest names the checkpoint's version as its
        parent. Raises CheckpointError if the last checkpoint of the run, or an earlier one, cannot be written.
        """
        is_new = self._training.position.version != self._training.resumed_from  # else it has a checkpoint
        due = self._training.checkpoint_due and is_new
        if self._versions.publish(wait_for_previous=wait_for_previous, wait=due) and due:
            self._checkpoints.begin()
            self._keep_manifests()
            if self._training.done:
                self._checkpoints.finish()
                self._keep_manifests()
                self._result.write()

    def _keep_manifests(self) -> None:
        """Keep what the present checkpoints need; if they cannot be listed, what those of before need: it is more."""
        try:
            self._manifests.keep(self._checkpoints.kept())
        except CheckpointError as error:
            log.warning("a restart will read from an older manifest: %s", error)

    def _is_published(self) -> bool:
        """Wait `STOP_FLUSH_S` for the version in transit; whether the newest one is published. Raises PublishFailed,
        TimeoutError."""
        self._publishing.publisher.flush(STOP_FLUSH_S)
        return self._publishing.publisher.published == self._training.position.version

    def _metric(self, values: dict[str, float]) -> Output:
        metric = Metric("trainer", self._training.trained, finite(values), self._services.unix_ms())
        return Output(METRICS, "trainer", metric)


@dataclass(frozen=True)
class FinalModel:
    """Writes the weights of `training` to the Hugging Face folder `folder`, with the tokenizer of `model`."""

    training: RankTraining
    model: Path
    folder: Path
    tries: int

    def write(self) -> None:
        """Write it, unless an earlier epoch has: weights are a function of the log.

        Raises CheckpointError after `tries` attempts.
        """
        if not self.folder.exists():
            self.training.rendezvous.services.persist(self._write, self.tries)

    def _write(self) -> None:
        joint = self.training.joint
        try:
            with closing(joint.gather()) as tensors:  # the error refers to it until the next attempt
                self.training.rendezvous.services.write_model(
                    *(self.training.model, self.model, joint.full.specs(), tensors, self.folder)
                )
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot write the final model to {self.folder.absolute()}: {error}") from error
