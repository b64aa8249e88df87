"""What users name in a configuration: modules of theirs, and names that were meant to be others."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def import_user_module(name: str) -> Any:
    """The module `package.module` or `path/to/file.py`, imported. Raises ValueError for a file that is not there."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name).expanduser().resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"no file {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def suggest_name(name: str, valid: Iterable[str], most: int | None = None) -> str:
    """The end of an error message about an unknown `name`: the closest valid one, or all if they are `most` at most."""
    known = list(valid)
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; it must be one of {sorted(known)}" if most is None or len(known) <= most else ""
