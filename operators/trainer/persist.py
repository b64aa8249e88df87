"""Writing what must last: tried again for a while, then an error that ends the trainer. Free of torch."""

from __future__ import annotations

import logging
from collections.abc import Callable

from infra.runners.stopping import STOPPING

log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Before the second try; twice as long before each further one."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which, why, and what is left."""


def persist(write: Callable[[], object], tries: int, wait: Callable[[float], bool] = STOPPING.wait) -> None:
    """Call `write`, which raises CheckpointError where it fails, up to `tries` times. Raises its last error.

    `wait` pauses for so many seconds and returns whether this process is to stop, which ends the tries.
    """
    for number in range(1, tries + 1):
        try:
            write()
            return
        except CheckpointError as error:
            if number == tries:
                raise CheckpointError(f"given up after {tries} tries (trainer.checkpoint_tries): {error}") from error
            log.error("try %d of %d: %s", number, tries, error)
            if wait(PAUSE_S * 2 ** (number - 1)):
                raise
