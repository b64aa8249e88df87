"""Results of long benchmarks, saved as soon as they are measured: a stopped command continues where it stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.files import write_atomically

Result = dict[str, Any]


class Results:
    """Results by key, in `file`. A key names all that its result depends on. Delete the file to measure again."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._results: dict[str, Result] = json.loads(file.read_text("utf-8")) if file.exists() else {}

    def get(self, key: str) -> Result | None:
        """The saved result of `key`, or None."""
        return self._results.get(key)

    def add(self, key: str, measure: Callable[[], Result]) -> None:
        """Save the result of `measure` and print it to stderr; do nothing if `key` has a result."""
        if key in self._results:
            return
        self._results[key] = measure()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file, json.dumps(self._results, indent=1))
        sys.stderr.write(f"{key}: {self._results[key]}\n")


def checked_out() -> str:
    """The commit of the working tree, and whether it was changed."""

    def git(*arguments: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
