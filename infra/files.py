"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(file: Path, text: str) -> None:
    """Write `text` to `file` so that a reader sees the old content or the new, never a part."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def write_durably(file: Path, text: str) -> None:
    """As `write_atomically`, and on the disk when it returns: it outlives the machine's end, not only the process's."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    with partial.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    partial.replace(file)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
