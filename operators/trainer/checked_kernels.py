"""Kernels of our own, used once they have given torch's results on a device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)

Kernels = TypeVar("Kernels")


def checked(load: Callable[[], Kernels], check: Callable[[Kernels], None], without: str) -> Kernels | None:
    """What `load` imports, once `check` has passed; None, and a warning of `without`, if any of both fails.

    Triton compiles kernels with the machine's C compiler, which an image may lack.
    """
    try:
        kernels = load()
        check(kernels)
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises: torch computes the same
        reason = str(error).strip().partition("\n")[0]
        log.warning("%s: %s: %s", without, type(error).__name__, reason)
        return None
    return kernels
