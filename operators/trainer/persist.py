"""Writes with retries for checkpoints and the final model. It does not import torch."""

from __future__ import annotations

import logging
from collections.abc import Callable

from infra.runners.stopping import STOPPING

log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Pause before the second attempt; doubled before each further one."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The message says which, why, and which checkpoints remain."""


def persist(write: Callable[[], object], tries: int, wait: Callable[[float], bool] = STOPPING.wait) -> None:
    """Call `write`, which raises CheckpointError on failure, up to `tries` times. Raises the last error.

    `wait` pauses for the given seconds and returns whether this process must stop, which ends the attempts.
    """
    for number in range(1, tries + 1):
        try:
            write()
            return
        except CheckpointError as error:
            if number == tries:
                raise CheckpointError(f"failed after {tries} attempts (trainer.checkpoint_tries): {error}") from error
            log.error("attempt %d of %d failed: %s", number, tries, error)
            if wait(PAUSE_S * 2 ** (number - 1)):
                raise
