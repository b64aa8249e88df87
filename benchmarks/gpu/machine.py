"""The machine: its device, and a folder for the model."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from infra.store.incoming_version import free_bytes
from infra.store.names import SHARED_MEMORY, default_root


def describe(device: str) -> dict[str, str | int]:
    """The device's name, its free memory in bytes, and the versions of what drives it."""
    found: dict[str, str | int] = {"torch": torch.__version__, "name": "cpu", "memory": 0}
    if device != "cpu":
        if not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} finds no GPU here: use --device cpu, or install its driver")
        major, minor = torch.cuda.get_device_capability()
        found |= {
            "name": torch.cuda.get_device_name(),
            "memory": torch.cuda.mem_get_info()[0],
            "capability": f"{major}.{minor}",
            "cuda": str(torch.version.cuda),
        }
    return found


def scratch_folder(needed: int) -> Path:
    """A new folder for `needed` bytes: in shared memory if there is room for twice as many, else on a disk."""
    return Path(tempfile.mkdtemp(prefix="laminar-gpu-check-", dir=SHARED_MEMORY if _has_room(needed) else None))


def store_root(name: str, needed: int) -> Path:
    """The folder of a weight store of `needed` bytes: in shared memory if there is room for twice as many."""
    return default_root(name) if _has_room(needed) else default_root(name, Path(tempfile.gettempdir()))


def _has_room(needed: int) -> bool:
    return SHARED_MEMORY.is_dir() and free_bytes(SHARED_MEMORY) > 2 * needed
