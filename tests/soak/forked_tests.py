"""A pytest session that collects tests once, then runs some of them in forked processes, each with its own fault.

The process that forks has imported everything and never run a test: threads of torch would not survive a fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

Lines = dict[str, list[int]]
MAX_ANSWER = 1 << 20


@dataclass(frozen=True)
class Cover:
    """What a test costs and runs: CPU seconds of its own and of the processes it starts; lines by module name."""

    own_s: float
    children_s: float
    lines: Lines


class ForkedTests:
    """A pytest plugin: `main(tests)` runs instead of the collected tests, in this process."""

    def __init__(self, main: Callable[[ForkedTests], int]) -> None:
        self._main, self.code = main, 1
        self._items: dict[str, pytest.Item] = {}
        self._failed = ""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = {item.nodeid: item for item in session.items}
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all forks
        self.code = self._main(self)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._failed:
            self._failed = report.nodeid

    @property
    def names(self) -> list[str]:
        """The names of all collected tests."""
        return list(self._items)

    def first_failure(self, names: Sequence[str], prepare: Callable[[], None], cpu_s: float, wall_s: float) -> str:
        """Run `prepare`, then the tests `names` in order until one fails, in a fork; its name, "-" if all pass."""

        def run() -> str:
            try:
                prepare()
            except Exception as error:  # noqa: BLE001  (a mutant that cannot be imported)
                return f"import: {error!r}"[:200]
            resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s), int(cpu_s) + 5))
            return self._run(names) or "-"

        return in_fork(run, wall_s)

    def cover(self, name: str, folder: Path, wall_s: float) -> Cover | None:
        """What the test `name` costs, and the lines that it runs of the modules in `folder`; None if it fails."""

        def run() -> str:
            began, children = time.process_time(), resource.getrusage(resource.RUSAGE_CHILDREN)
            lines = traced_lines(folder, lambda: self._run([name]))
            if self._failed:
                return "null"
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            started = after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime
            return json.dumps([time.process_time() - began, started, lines])

        answer = in_fork(run, wall_s)
        try:
            found = json.loads(answer)
        except ValueError:
            found = None
        return None if found is None else Cover(*found)

    def _run(self, names: Sequence[str]) -> str:
        items = [self._items[name] for name in names]
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._failed:
                break
        return self._failed


def in_fork(run: Callable[[], str], wall_s: float) -> str:
    """The result of `run` in a forked process with its own session; a sentence if it does not return."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        os.setsid()
        silent = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(silent, descriptor)
        try:
            answer = run()
        except BaseException:  # noqa: BLE001  (reported by the parent; this process ends here)
            answer = f"the test process failed: {traceback.format_exc()[-1000:]}"
        with os.fdopen(write_end, "w") as pipe:
            pipe.write(answer[:MAX_ANSWER])
            pipe.flush()
        os._exit(0)
    os.close(write_end)
    signal.signal(signal.SIGALRM, lambda *_: kill_session(child))
    signal.setitimer(signal.ITIMER_REAL, wall_s)
    with os.fdopen(read_end) as pipe:
        answer = pipe.read()
    signal.setitimer(signal.ITIMER_REAL, 0)
    _, status = os.waitpid(child, 0)
    kill_session(child)
    return answer or f"the test process ended by signal {os.WTERMSIG(status)}"


def kill_session(leader: int) -> None:
    """Kill what a test has left running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def traced_lines(folder: Path, run: Callable[[], Any]) -> Lines:
    """The lines of the modules in `folder` that `run` executes in this thread, by module name."""
    found: dict[str, set[int]] = {}
    prefix = f"{folder}/"

    def trace_calls(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(prefix):
            return None
        seen = found.setdefault(Path(frame.f_code.co_filename).stem, set())

        def trace_lines(inner: FrameType, event: str, argument: object) -> Any:
            seen.add(inner.f_lineno)
            return trace_lines

        seen.add(frame.f_lineno)
        return trace_lines

    sys.settrace(trace_calls)
    try:
        run()
    finally:
        sys.settrace(None)
    return {name: sorted(lines) for name, lines in found.items()}
