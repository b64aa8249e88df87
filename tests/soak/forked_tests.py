"""A pytest session that collects tests once, then runs some of them in forked processes, each with its own fault.

The process that forks has imported everything and never run a test: threads of torch would not survive a fork.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from line_tracer import FILE, FOLDER, start_tracing

Lines = dict[str, list[int]]
MAX_ANSWER = 1 << 20
MAX_S = 3600.0
"""Seconds of a test whose limit is unknown."""


@dataclass(frozen=True)
class Cover:
    """What a test costs and runs, with the processes that it starts: seconds, and lines by module name."""

    cpu_s: float
    wall_s: float
    lines: Lines

    @property
    def limit_s(self) -> float:
        """Seconds after which the test of a mutant has failed."""
        return max(60.0, 8 * self.wall_s)


class ForkedTests:
    """A pytest plugin: `main(tests)` runs instead of the collected tests, in this process.

    Tests of a file that use its fixture in `together`, which computes for all of them, run together in one fork and
    have one name, `FILE::FIXTURE`.
    """

    def __init__(self, main: Callable[[ForkedTests], int], together: Mapping[str, str]) -> None:
        self._main, self._together, self.code = main, together, 1
        self._items: dict[str, list[pytest.Item]] = {}
        self._failed = ""
        self._report: Callable[[str], None] = lambda name: None

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for item in session.items:
            self._items.setdefault(self._name_of(item), []).append(item)
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

    @property
    def members(self) -> dict[str, list[str]]:
        """Pytest's names of the tests that have one name here."""
        return {name: [item.nodeid for item in items] for name, items in self._items.items()}

    def _name_of(self, item: pytest.Item) -> str:
        fixture = self._together.get(item.path.name)
        is_one_of_them = isinstance(item, pytest.Function) and fixture in item.fixturenames
        return f"{item.nodeid.partition('::')[0]}::{fixture}" if is_one_of_them else item.nodeid

    def first_failure(self, limits: dict[str, float], prepare: Callable[[], None]) -> str:
        """Run `prepare`, then the tests of `limits` in order until one fails, in a fork; pytest's name of it, "-" if
        all pass.

        A test that takes longer than its limit, in seconds, has failed: `time-out: ` and its name.
        """

        def run(report: Callable[[str], None]) -> str:
            try:
                prepare()
            except Exception as error:  # noqa: BLE001  (a mutant that cannot be imported)
                return f"import: {error!r}"[:200]
            self._report = report
            return self._run(list(limits)) or "-"

        return in_fork(run, limits)

    def cover(self, name: str, folder: Path) -> Cover | None:
        """What the test `name` costs, and the lines that it runs of the modules in `folder`; None if it fails."""

        def run(report: Callable[[str], None]) -> str:
            began, before = time.monotonic(), cpu_seconds()
            lines = traced_lines(folder, lambda: self._run([name]))
            if self._failed:
                return "null"
            return json.dumps([cpu_seconds() - before, time.monotonic() - began, lines])

        answer = in_fork(run, {})
        try:
            found = json.loads(answer)
        except ValueError:
            found = None
        return None if found is None else Cover(*found)

    def _run(self, names: Sequence[str]) -> str:
        items = [(name, item) for name in names for item in self._items[name]]
        running = ""
        for (name, item), (_, following) in itertools.zip_longest(items, items[1:], fillvalue=("", None)):
            if name != running:
                self._report(running := name)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._failed:
                break
        return self._failed


def in_fork(run: Callable[[Callable[[str], None]], str], limits: dict[str, float]) -> str:
    """The result of `run` in a forked process with its own session; a sentence if it does not return.

    `run` says which test it begins; `limits` are the seconds that each may take.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        os.setsid()
        silent = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(silent, descriptor)
        try:
            answer = run(lambda name: write_all(write_end, f"\n{name}"))
        except BaseException:  # noqa: BLE001  (reported by the parent; this process ends here)
            answer = f"the test process failed: {traceback.format_exc()[-1000:]}"
        write_all(write_end, f"\0{answer[:MAX_ANSWER]}\0")
        os._exit(0)
    os.close(write_end)
    received, ended = read_watched(read_end, limits, MAX_S)
    os.close(read_end)
    kill_session(child)
    _, status = os.waitpid(child, 0)
    progress, answered, answer = received.partition("\0")
    if answered:
        return answer.removesuffix("\0")
    if not ended:
        return f"time-out: {progress.rpartition(chr(10))[2]}"
    return f"the test process ended by signal {os.WTERMSIG(status)}"


def write_all(descriptor: int, text: str) -> None:
    """Write all of `text`, to a pipe that may take it in parts."""
    left = text.encode()
    while left:
        left = left[os.write(descriptor, left) :]


def read_watched(descriptor: int, limits: dict[str, float], other_s: float) -> tuple[str, bool]:
    """What arrives, and whether it ended before the limit of the test that the last line names (or `other_s`)."""
    received = b""
    while True:
        text = received.decode(errors="replace")
        limit_s = limits.get(text.rpartition("\n")[2].strip(), other_s)
        if not select.select([descriptor], [], [], limit_s)[0]:
            return text, False
        if not (more := os.read(descriptor, 1 << 16)):
            return text, True
        received += more
        if more.endswith(b"\0"):  # a process that a test has left running may keep the pipe open
            return received.decode(errors="replace"), True


def kill_session(leader: int) -> None:
    """Kill what a test has left running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def cpu_seconds() -> float:
    """CPU seconds of this process and of those that it started and that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def traced_lines(folder: Path, run: Callable[[], Any]) -> Lines:
    """The lines of the modules in `folder` that `run` executes, also in processes that it starts, by module name."""
    with tempfile.NamedTemporaryFile("r") as file:
        os.environ |= {FOLDER: str(folder), FILE: file.name}
        start_tracing()
        try:
            run()
        finally:
            sys.settrace(None)
        found: dict[str, set[int]] = {}
        for line in file:
            name, number = line.split()
            found.setdefault(name, set()).add(int(number))
    return {name: sorted(lines) for name, lines in found.items()}
