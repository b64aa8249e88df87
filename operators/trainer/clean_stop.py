"""The clean stop of the trainer: a checkpoint of its newest version, so that no batch since the last one is lost.

All ranks stop at the same version. Rank 0 decides whether it gets a checkpoint, of which each rank writes its part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from infra.models.device_copies import use_device
from infra.store.publisher import PublishFailed
from operators.io.elements import Output
from operators.trainer.checkpoint_writer import CheckpointWriter
from operators.trainer.joint_actions import RanksStop
from operators.trainer.persist import CheckpointError
from operators.trainer.rank_lost import RankLost
from operators.trainer.rank_training import RankTraining
from operators.trainer.rendezvous import Rendezvous, lost_ranks

OWN_STOP_S = 10.0
"""How long a rank that another has stopped waits for its own stop request: those of a run arrive together."""
_POLL_S = 0.02
_NOTE, _KEEP, _LEAVE = "clean stop", "keep", "leave"

log = logging.getLogger(__name__)


def fold_with_ranks(training: RankTraining, fold: Callable[[], list[Output]]) -> list[Output]:
    """The outputs of `fold`; none once the ranks stop together.

    Raises RankLost if another rank has ended, or was stopped while this one was not: both begin again.
    """
    if training.joint.stopped:
        return []
    use_device(training.device)  # runners fold on any of their threads
    try:
        with lost_ranks():
            return fold()
    except RanksStop as stop:
        if not training.rendezvous.services.stopping.wait(OWN_STOP_S):
            raise RankLost("another rank was stopped, this one was not") from stop
        return []


def keep_newest(training: RankTraining, checkpoints: CheckpointWriter, is_published: Callable[[], bool]) -> None:
    """On rank 0: write a checkpoint of the newest version with all ranks. One attempt; a failure is logged.

    `is_published` waits a bounded time until the version is published; without that it gets no checkpoint.
    """
    rendezvous, decision = training.rendezvous, _LEAVE
    try:
        with lost_ranks():
            if not _stopped_after_training(training, checkpoints):
                return
            if training.position.version in checkpoints.kept() or not is_published():
                return
            decision = _KEEP
            rendezvous.post(_NOTE, decision)
            checkpoints.begin()
            checkpoints.finish()
    except (CheckpointError, PublishFailed, RankLost, OSError) as error:  # TimeoutError is an OSError
        log.warning("the run stops without a checkpoint of version %s: %s", training.position.version, error)
    finally:
        if decision is _LEAVE:
            try:
                rendezvous.post(_NOTE, decision)
            except RuntimeError as error:
                log.debug("the other ranks have ended: %s", error)


def keep_with_rank_0(training: RankTraining, checkpoints: CheckpointWriter) -> None:
    """On any other rank: write this rank's part of the checkpoint if rank 0 makes one. A failure is logged."""
    try:
        with lost_ranks():
            if _stopped_after_training(training, checkpoints) and _decision(training.rendezvous) == _KEEP:
                checkpoints.begin()
                checkpoints.finish()
    except (CheckpointError, RankLost) as error:
        log.warning("the run stops without this rank's part of version %s: %s", training.position.version, error)


def _stopped_after_training(training: RankTraining, checkpoints: CheckpointWriter) -> bool:
    """Stop training. Return whether batches were trained; the last checkpoint that was begun is complete then."""
    use_device(training.device)  # as in `fold_with_ranks`
    training.joint.stop()
    if training.trained == 0:
        return False
    checkpoints.finish()
    return True


def _decision(rendezvous: Rendezvous) -> str:
    """Rank 0's decision, which it always makes unless it ends: RankLost is raised then."""
    while (note := rendezvous.posted(_NOTE)) is None:
        rendezvous.services.system.sleep(_POLL_S)
    return note
