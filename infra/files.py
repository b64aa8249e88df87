"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(file: Path, text: str) -> None:
    """Write `text` to `file` so that a reader sees the old content or the new, never a part."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)
