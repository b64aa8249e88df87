"""Writes a run's checkpoints in the background, with retries: each rank its file, rank 0 the manifest.

Weights and moments change only in an optimizer step, so nothing is copied: a thread writes the learner's own tensors
while the learner waits for the next batch and computes its gradients, and the step waits for the thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import TypeVar

from infra.models.device_copies import synchronize, use_own_stream
from infra.storage import StorageFolder
from operators.trainer.checkpoint import complete_checkpoint, find_checkpoints, write_checkpoint, write_part
from operators.trainer.checkpoint_files import RankFile, TrainerPosition
from operators.trainer.learner_state import LearnerState
from operators.trainer.persist import CheckpointError
from operators.trainer.rank_training import RankTraining
from operators.trainer.rendezvous import notes_of_others
from operators.trainer.training_config import TrainingConfig
from schemas.records import PolicyVersion

T = TypeVar("T")


class CheckpointWriter:
    """Writes checkpoints of `training` to `checkpoints`; every rank has one.

    All methods that wait raise CheckpointError if a write has failed after `trainer.checkpoint_tries` attempts.
    """

    def __init__(self, config: TrainingConfig, training: RankTraining, checkpoints: StorageFolder) -> None:
        self._config, self._training, self._checkpoints = config, training, checkpoints
        self._services = training.rendezvous.services
        system = self._services.system
        self._thread = system.pool(1, "write checkpoint", partial(use_own_stream, training.device))
        self._closed = system.event()
        self._part: Future[RankFile] | None = None
        self._whole: Future[None] | None = None
        self._completed = False
        self._begun: PolicyVersion | None = None
        training.before_change(self.wait_for_own_part)

    def kept(self) -> list[PolicyVersion]:
        """The versions of the newest `checkpoints_kept` checkpoints, oldest first, and of the one being written.

        A process that is killed may have completed it, so that its successor resumes from it. Raises CheckpointError.
        """
        newest = find_checkpoints(self._checkpoints)[-self._config.checkpoints_kept :]
        versions = [PolicyVersion.parse(folder.name) for folder in newest]
        if self._begun is not None and self._begun not in versions:
            versions.append(self._begun)
        return versions

    def begin(self) -> None:
        """Begin a checkpoint of the current version, which is due; an earlier one must be complete first."""
        self.finish()
        state, position = self._training.state(), self._training.position
        self._begun = position.version
        synchronize(self._training.device)  # the thread's stream does not wait for the last step
        if self._training.ranks.count == 1:
            self._part = None
            self._whole = self._thread.submit(self._write_alone, state, position)
            return
        self._part = self._thread.submit(self._write_part, state, position)
        if self._training.ranks.rank == 0:
            self._whole = self._thread.submit(self._complete, self._part, state, position)

    def wait_for_own_part(self) -> None:
        """Wait until the weights and moments may change."""
        if self._training.ranks.count > 1:
            if self._part is not None:
                self._thread.result(self._part)
        elif self._whole is not None:
            self._thread.result(self._whole)

    def check(self) -> None:
        """Raise the error of this rank's part if it could not be written. Does not wait."""
        if self._part is not None and self._part.done():
            self._part.result()

    def finished(self) -> bool:
        """Whether a checkpoint has been completed since the last call. Does not wait."""
        if self._whole is not None and self._whole.done():
            self.finish()
        completed, self._completed = self._completed, False
        return completed

    def finish(self) -> None:
        """Wait until the checkpoint that was begun is complete; on ranks other than 0, until their part of it is."""
        self.wait_for_own_part()
        whole, self._whole, self._part = self._whole, None, None
        if whole is not None:
            self._thread.result(whole)
            self._completed, self._begun = True, None

    def close(self) -> None:
        """Stop waiting for other ranks; a checkpoint that is not complete stays so."""
        self._closed.set()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _persist(self, write: Callable[[], T]) -> T:
        return self._services.persist(write, self._config.checkpoint_tries)

    def _keep(self) -> dict[str, int]:
        return {"keep": self._config.checkpoints_kept, "keep_every": self._config.keep_every}

    def _write_alone(self, state: LearnerState, position: TrainerPosition) -> None:
        write_checkpoint(self._checkpoints, state, position, **self._keep(), retry=self._persist)

    def _write_part(self, state: LearnerState, position: TrainerPosition) -> RankFile:
        ranks = self._training.ranks
        file = self._persist(lambda: write_part(self._checkpoints, state, position, ranks))
        self._training.rendezvous.post(_note(position, ranks.rank), json.dumps(asdict(file)))
        return file

    def _complete(self, own: Future[RankFile], state: LearnerState, position: TrainerPosition) -> None:
        """Wait for the parts of all ranks, then write the manifest. Raises RankLost if one of them has ended."""
        files = [own.result()]
        of_rank = partial(_note, position)
        for rank, note in notes_of_others(self._training.rendezvous, of_rank, self._closed, lambda note: True):
            if note is None:
                raise CheckpointError(f"checkpoint {position.version} lacks the part of rank {rank}: this rank stops")
            files.append(RankFile(**json.loads(note)))
        self._persist(lambda: complete_checkpoint(self._checkpoints, state, position, files, **self._keep()))


def _note(position: TrainerPosition, rank: int) -> str:
    return f"checkpoint {position.version} rank {rank}"
