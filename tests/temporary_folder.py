"""A temporary directory of the session's own, which must be empty at its end.

Files that the product or a test leaves in the temporary directory fill the disk of a machine on which it runs for
weeks. All processes of a session share the folder: `TMPDIR` names it, and the workers of xdist inherit it. Pytest's own
folders stay outside. The fixture `killed_programs` gives another folder to programs that a test kills: only what the
next start of the program would remove may be left there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

CACHES = ("torchinductor_*", "beam-requirements-cache", "vllm_dist_*", "uv-*.lock")
"""What libraries and uv keep there on purpose, and the file by which the workers of a vLLM engine find each other."""
REMOVED_LATER = tuple(f"laminar-{what}-*" for what in ("run", "pipeline", "server", "audit", "agents", "sandbox"))
"""What killed programs leave until the next one starts: see `infra.scratch` and `temporary_folder` of the zygote."""
MAX_NAMED = 20


def unexpected_in(folder: Path, expected: Sequence[str] = CACHES) -> list[Path]:
    """The entries of `folder` that match none of the patterns `expected`."""
    found = {path for pattern in expected for path in folder.glob(pattern)}
    return [path for path in sorted(folder.iterdir()) if path not in found]


def register(config: pytest.Config) -> None:
    """Make the folder and watch it, unless this process is a worker of a session that does."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(TemporaryFolder(tempfile.gettempdir()))


class TemporaryFolder:
    """The plugin of one session. It makes the folder and sets `TMPDIR` to it."""

    def __init__(self, outside: str) -> None:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", outside)
        self._folder = Path(tempfile.mkdtemp(prefix="laminar-tests-", dir=outside))
        os.environ["TMPDIR"] = tempfile.tempdir = str(self._folder)
        self._seen: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """After each test: note new entries. With several workers the test may be one that ran at the same time."""
        if report.when == "teardown":
            for name in os.listdir(self._folder):
                self._seen.setdefault(name, report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Remove the folder. The session fails if an entry was left in it."""
        left = self._left()
        shutil.rmtree(self._folder, ignore_errors=True)
        if left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if left and reporter is not None:
            more = [f"and {len(left) - MAX_NAMED} more"] if len(left) > MAX_NAMED else []
            reporter.write_sep("=", "left in the temporary directory", red=True)
            reporter.write_line("\n".join([*left[:MAX_NAMED], *more]))

    def _left(self) -> list[str]:
        return [self._described(path) for path in unexpected_in(self._folder)]

    def _described(self, path: Path) -> str:
        within = sorted(each.name for each in path.iterdir())[:5] if path.is_dir() else []
        name = f"{path.name}/{{{','.join(within)}}}" if within else path.name
        return f"{name} (first seen after {self._seen.get(path.name, 'the last test')})"
