"""Planted defects of the trainer's ranks, its checkpoints and its versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from infra.store.publisher import TensorWriter
from operators.trainer.background_writer import BackgroundWriter
from operators.trainer.joint_actions import JointActions
from operators.trainer.publishing import Publishing
from operators.trainer.rank_training import RankTraining
from operators.trainer.train_batches import TrainBatches
from operators.trainer.train_follower import TrainFollower
from schemas.records import WeightVersion


def weights_change_while_they_are_written(patch: pytest.MonkeyPatch) -> None:
    """An optimizer step does not wait for the threads that write the weights into the file of a version."""
    patch.setattr(JointActions, "wait_until_written", lambda self: None)


def version_lacks_parts_of_ranks(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 seals a version once it has written its own part."""
    patch.setattr(BackgroundWriter, "wait_for_all", lambda self, number: self.wait())


def checkpoint_changes_while_it_is_written(patch: pytest.MonkeyPatch) -> None:
    """An optimizer step does not wait for the thread that writes the checkpoint."""
    before_change = RankTraining.before_change

    def without_checkpoints(self: RankTraining, wait: Callable[[], None]) -> None:
        if wait.__qualname__ != "CheckpointWriter.wait_for_own_part":
            before_change(self, wait)

    patch.setattr(RankTraining, "before_change", without_checkpoints)


def rank_reads_on_where_it_has_committed(patch: pytest.MonkeyPatch) -> None:
    """A start of a rank reads from its committed offsets on, not from the checkpoint."""
    patch.setattr(TrainFollower, "resumed", lambda self: self.shard)
    patch.setattr(TrainBatches, "resumed", lambda self: self.shard)


def restored_version_is_not_delivered(patch: pytest.MonkeyPatch) -> None:
    """A start of the trainer does not deliver the version from which it resumes, if its own store has it."""

    def restore(self: Any, weights: TensorWriter, manifest: WeightVersion) -> None:
        if self.publisher.restore_version(weights, manifest):
            self._pusher.announce(manifest)

    patch.setattr(Publishing, "restore_version", restore)


RANK_MUTATIONS = (
    weights_change_while_they_are_written,
    version_lacks_parts_of_ranks,
    checkpoint_changes_while_it_is_written,
    rank_reads_on_where_it_has_committed,
    restored_version_is_not_delivered,
)
