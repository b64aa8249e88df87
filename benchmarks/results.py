"""Results of long benchmarks, saved as soon as they are measured: a stopped command continues where it stopped."""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.files import write_atomically

Result = dict[str, Any]
ROOT = Path(__file__).parents[1]
SIMULATED_CODE = tuple(ROOT / name for name in ("infra", "operators", "pipelines", "schemas"))
"""The folders whose code a simulation runs."""
_CODE = "code"


class Results:
    """Results by key, in `file`. A key names all that its result depends on, but the code: whether the product's has
    changed since is said. Delete the file to measure again."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._results: dict[str, Result] = json.loads(file.read_text("utf-8")) if file.exists() else {}
        self._code = code_hash(*SIMULATED_CODE)

    def get(self, key: str) -> Result | None:
        """The saved result of `key`, or None."""
        saved = self._results.get(key)
        return None if saved is None else {name: value for name, value in saved.items() if name != _CODE}

    def add(self, key: str, measure: Callable[[], Result]) -> None:
        """Save the result of `measure` and print it to stderr; if `key` has a result, keep it and say so."""
        if (saved := self._results.get(key)) is not None:
            again = "" if saved.get(_CODE) == self._code else f" by other code; to measure again, delete {self._file}"
            sys.stderr.write(f"{key}: measured before{again}\n")
            return
        self._results[key] = measure() | {_CODE: self._code}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file, json.dumps(self._results, indent=1))
        sys.stderr.write(f"{key}: {self.get(key)}\n")


def add_results(arguments: argparse.ArgumentParser, file: str) -> None:
    """Add the options about results, which are saved in `file`."""
    arguments.add_argument("--results", type=Path, default=Path(file))
    arguments.add_argument("--known", action="store_true", help="only print saved results")
    arguments.add_argument("--json", action="store_true")


def checked_out() -> str:
    """The commit of the working tree, and whether it was changed."""

    def git(*arguments: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain") else "")


def loaded_code() -> list[Path]:
    """The files of this repository that this process has loaded."""
    found = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    files = {Path(file) for file in found if file is not None}
    return sorted(file for file in files if file.is_relative_to(ROOT) and not file.is_relative_to(ROOT / ".venv"))


def code_hash(*paths: Path) -> str:
    """A hash of these Python files, and of those in these folders: results of other code are not those of this one."""
    files = sorted(file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py")))
    found = hashlib.blake2b(digest_size=8)
    for file in files:
        found.update(f"{file.relative_to(ROOT)}\n".encode())
        found.update(file.read_bytes())
    return found.hexdigest()
