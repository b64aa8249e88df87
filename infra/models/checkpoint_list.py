"""The checkpoints in a folder, by the names of their folders. Imports no torch, so that commands can list them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from infra.storage import RemotePath, StorageFolder
from schemas.records import PolicyVersion

MANIFEST = "checkpoint.json"
"""The manifest of a checkpoint, which is written last."""


def list_checkpoints(root: StorageFolder) -> list[StorageFolder]:
    """The complete checkpoints under `root`, oldest first; none if `root` does not exist.

    Raises OSError if `root` cannot be read.
    """
    if isinstance(root, Path) and not root.is_dir():
        return []
    return [root / name for name in _versions(folder.name for folder in root.iterdir()) if is_complete(root / name)]


def list_unfinished(root: RemotePath) -> list[RemotePath]:
    """The folders under `root` that are named by versions but are no checkpoints, oldest first.

    Raises OSError if `root` cannot be read.
    """
    return [root / name for name in _versions(each.name for each in root.iterdir()) if not is_complete(root / name)]


def is_complete(folder: StorageFolder) -> bool:
    """Whether `folder`, which is named by a version, is a complete checkpoint."""
    return (folder / MANIFEST).exists() if isinstance(folder, RemotePath) else folder.exists()


def _versions(names: Iterable[str]) -> list[str]:
    """The `names` that are policy versions, in the order of versions."""
    found = []
    for name in names:
        try:
            found.append((PolicyVersion.parse(name), name))
        except ValueError:
            continue
    return [name for _, name in sorted(found)]
