"""What long benchmarks have found, written as soon as it is known: a command goes on where it stopped."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.files import write_atomically

Result = dict[str, Any]


class Results:
    """Results by key, in `file`. A key says all that its result depends on; to measure anew is to remove the file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: dict[str, Result] = json.loads(file.read_text("utf-8")) if file.exists() else {}

    def get(self, key: str) -> Result | None:
        """What is known of `key`."""
        return self._known.get(key)

    def add(self, key: str, measure: Callable[[], Result]) -> None:
        """What `measure` finds, written and told to stderr; nothing where `key` is known."""
        if key in self._known:
            return
        self._known[key] = measure()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file, json.dumps(self._known, indent=1))
        sys.stderr.write(f"{key}: {self._known[key]}\n")
