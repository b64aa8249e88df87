"""Whole states in checkpoints, for tests."""

from __future__ import annotations

from infra.storage import StorageFolder
from operators.trainer.checkpoint_files import StoredState, TrainerPosition
from operators.trainer.learner_state import LearnerState
from operators.trainer.ranks import ALONE


def read_checkpoint(folder: StorageFolder) -> tuple[LearnerState, TrainerPosition]:
    """The whole state and the position in `folder`."""
    with StoredState(folder) as stored:
        stored.verify(ALONE)
        tensors = {name: stored.tensor(name) for name in stored.shapes}

    def kind(prefix: str) -> dict[str, object]:
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    state = LearnerState(
        weights=kind("weights."),
        moments=kind("moments."),
        random_state=tensors["random_state"],
        updates=stored.updates,
        skipped_updates=stored.skipped_updates,
        critic_weights=kind("critic.weights."),
        critic_moments=kind("critic.moments."),
    )
    return state, stored.position
