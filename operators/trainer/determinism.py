"""Kernels that give the same bits each time: on a GPU torch's defaults add in any order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

# torch reads it once, at the process's first matrix product on a GPU, and refuses deterministic ones without it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def kernels(device: torch.device, *, deterministic: bool) -> AbstractContextManager[None]:
    """The context in which a batch is trained on `device`: on a GPU with kernels that are `deterministic` if asked."""
    return _deterministic_kernels() if deterministic and device.type == "cuda" else nullcontext()


@contextmanager
def _deterministic_kernels() -> Iterator[None]:
    """Raise RuntimeError for an operation that has no deterministic kernel.

    With its `warn_only` torch would keep attention's non-deterministic kernels, and only warn.
    """
    uninitialized: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), uninitialized.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    uninitialized.fill_uninitialized_memory = False  # nothing reads it before it is written
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise RuntimeError(f"{error}. Set trainer.learner.deterministic = false to train without") from error
    finally:
        torch.set_deterministic_debug_mode(before[0])
        uninitialized.fill_uninitialized_memory = before[1]
