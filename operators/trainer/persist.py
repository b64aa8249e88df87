"""Writes and reads of checkpoints and the final model, with retries. It does not import torch."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import TypeVar

from infra.runners.stopping import STOPPING

T = TypeVar("T")
log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Pause before the second attempt; doubled before each further one."""
_DAMAGED = (KeyError, TypeError, ValueError, AttributeError)
_LASTING = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENOSPC,
    errno.EDQUOT,
}
"""Errors of a file system that another start would meet again."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The message says which, why, and which checkpoints remain."""


class CheckpointsUnavailable(CheckpointError):
    """The storage did not answer in all attempts: another start may succeed."""


def persist(action: Callable[[], T], tries: int, wait: Callable[[float], bool] = STOPPING.wait) -> T:
    """Call `action`, which raises CheckpointError on failure, up to `tries` times; return its result.

    Raises the last error, as CheckpointsUnavailable unless it would last, and at once one that is not of the storage: a
    damaged file stays so. `wait` pauses for the given seconds and returns whether this process must stop, which ends
    the attempts.
    """
    number = 1
    while True:
        try:
            return action()
        except CheckpointError as error:
            if error.__cause__ is None or isinstance(error.__cause__, _DAMAGED):
                raise
            if number >= tries:
                kind = (
                    CheckpointError if getattr(error.__cause__, "errno", None) in _LASTING else CheckpointsUnavailable
                )
                raise kind(f"failed after {tries} attempts (trainer.checkpoint_tries): {error}") from error
            log.error("attempt %d of %d failed: %s", number, tries, error)
            if wait(PAUSE_S * 2 ** (number - 1)):
                raise
        number += 1
