"""A temporary directory of the session's own, which must be empty at its end.

What the product or a test leaves in the temporary directory fills the disk of a machine on which it runs for weeks. All
processes of a session share the folder: `TMPDIR` names it, and the workers of xdist inherit it. Pytest's own folders
stay outside.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

CACHES = ("torchinductor_*", "beam-pipeline-temp*")
"""What libraries keep there on purpose, and what Beam leaves where a test kills a program that runs a pipeline."""
MAX_NAMED = 20
_FOLDER = pytest.StashKey[Path]()


def begin(config: pytest.Config) -> None:
    """Make the folder, unless this is a worker, whose controller has."""
    if hasattr(config, "workerinput"):
        return
    outside = tempfile.gettempdir()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", outside)
    folder = tempfile.mkdtemp(prefix="laminar-tests-", dir=outside)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    config.stash[_FOLDER] = Path(folder)


def end(session: pytest.Session) -> None:
    """Remove the folder; a session that has left something in it fails."""
    folder = session.config.stash.get(_FOLDER, None)
    if folder is None:
        return
    left = left_in(folder)
    shutil.rmtree(folder, ignore_errors=True)
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if left and (reporter := session.config.pluginmanager.get_plugin("terminalreporter")) is not None:
        more = [f"and {len(left) - MAX_NAMED} more"] if len(left) > MAX_NAMED else []
        reporter.write_sep("=", "left in the temporary directory", red=True)
        reporter.write_line("\n".join([*left[:MAX_NAMED], *more]))


def left_in(folder: Path) -> list[str]:
    """What is in `folder` that should not be: each entry with the first names within it."""
    caches = {path for pattern in CACHES for path in folder.glob(pattern)}
    return [_described(path) for path in sorted(folder.iterdir()) if path not in caches]


def _described(path: Path) -> str:
    within = sorted(each.name for each in path.iterdir())[:5] if path.is_dir() else []
    return f"{path.name}/{{{','.join(within)}}}" if within else path.name
