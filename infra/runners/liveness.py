"""Liveness and progress of a role's process, reported in one file.

Liveness: the process runs and no vital thread has failed. A dedicated thread rewrites the file every `EVERY_S` seconds,
so a container's probe needs only its age, however long a step takes. Progress: which step of which shard runs, for how
long, and the time budget in its configuration. A process exits if a step exceeds its budget or a vital thread has
failed; its log has the cause and the stacks of all threads.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from infra.files import write_atomically

log = logging.getLogger(__name__)

VARIABLE = "LAMINAR_ALIVE_FILE"
"""The environment variable with the path of the file, if it is not in the run's folder."""
EVERY_S = 5.0
SILENT_S = 3 * EVERY_S
"""A process that has not reported for so long has ended, or has lost its machine."""
EXIT_CODE = 70
"""Exit code of a process that ends for these reasons: EX_SOFTWARE of sysexits.h."""

StepPhase = Literal["restore", "fold"]


@dataclass(frozen=True)
class StepBudget:
    """Seconds that one step may take: `restore` builds the state of a start, `fold` processes one poll.

    `setting` is their name in the configuration. With `restart` a process that exceeds a budget exits; otherwise the
    step is only reported.
    """

    restore_s: float = 3600.0
    fold_s: float = 3600.0
    setting: str = "progress"
    restart: bool = True

    def of(self, phase: StepPhase) -> float:
        """The budget of `phase`."""
        return self.restore_s if phase == "restore" else self.fold_s


@dataclass(slots=True)
class _Shard:
    budget: StepBudget
    phase: StepPhase | None = None
    since: float = 0.0
    ready: bool = False
    reported: bool = False


class Liveness:
    """The state of this process. Steps and threads report to it whether or not a file is written."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], None] = os._exit,
        every_s: float = EVERY_S,
    ) -> None:
        self._clock, self._exit, self._every_s = clock, end, every_s
        self._shards: dict[str, _Shard] = {}
        self._failed: dict[str, str] = {}
        self._counters: dict[str, dict[str, int]] = {}
        self._file: Path | None = None
        self._steps_elsewhere = False
        self._lock = threading.Lock()

    def set_budget(self, group: str, budget: StepBudget) -> None:
        """Set the budget of the steps of the shard `group`."""
        self._shard(group).budget = budget

    @contextmanager
    def step(self, group: str, phase: StepPhase) -> Iterator[None]:
        """Record a step of the shard `group` during the `with` block."""
        shard = self._shard(group)
        shard.since, shard.reported, shard.phase = self._clock(), False, phase
        if phase == "restore":
            shard.ready = False
        try:
            yield
            shard.ready = True
        finally:
            shard.phase = None

    def count(self, group: str, name: str, amount: int) -> None:
        """Add `amount` to counter `name` of the shard `group`; the file has the totals of this process."""
        counters = self._counters.setdefault(group, {})
        counters[name] = counters.get(name, 0) + amount

    def counters(self, group: str) -> dict[str, int]:
        """The counters of the shard `group` in this process."""
        return dict(self._counters.get(group, {}))

    def clear(self) -> None:
        """Remove all shards, which are closed, and their counters."""
        with self._lock:
            self._shards.clear()
            self._counters.clear()

    def start_thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Start a vital thread, without which the process cannot work: it may return, but not raise."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                log.exception("the thread %s has failed", name)
                with self._lock:
                    self._failed[name] = repr(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def set_steps_elsewhere(self) -> None:
        """The job is submitted, and other processes run its steps and check them: this process is ready."""
        self._steps_elsewhere = True

    def report(self) -> dict[str, Any]:
        """The content of the file."""
        now = self._clock()
        with self._lock:
            shards, failed = dict(self._shards), dict(self._failed)
        return {
            "pid": os.getpid(),
            "ready": bool(shards or self._steps_elsewhere) and all(shard.ready for shard in shards.values()),
            "failed_threads": failed,
            "counters": {group: dict(counters) for group, counters in dict(self._counters).items()},
            "steps": {
                group: {
                    "phase": shard.phase,
                    "seconds": round(now - shard.since, 1),
                    "budget_s": shard.budget.of(shard.phase),
                    "stalled": now - shard.since > shard.budget.of(shard.phase),
                }
                for group, shard in shards.items()
                if shard.phase is not None
            },
        }

    def check(self) -> None:
        """Exit the process if a vital thread has failed or a step exceeds its budget."""
        with self._lock:
            shards, failed = dict(self._shards), dict(self._failed)
        for name, error in failed.items():
            self._end_process(f"the thread {name} has failed: {error}")
        for group, shard in shards.items():
            phase, seconds = shard.phase, self._clock() - shard.since
            if phase is None or shard.reported or seconds <= shard.budget.of(phase):
                continue
            shard.reported = True
            budget = shard.budget
            what = (
                f"the step `{phase}` of {group} has taken {seconds:.0f} s, more than its budget of "
                f"{budget.of(phase):g} s: raise {budget.setting} if such a step may take longer"
            )
            if budget.restart:
                self._end_process(what)
            else:
                _dump_stacks()
                log.error("%s", what)

    @contextmanager
    def reporting(self, file: Path | None) -> Iterator[None]:
        """Rewrite `file` and check this process during the `with` block; without a file only check."""
        stopped = threading.Event()
        self._file, self._steps_elsewhere = file, False
        self._failed.clear()
        thread = threading.Thread(target=self._write_reports, args=(stopped,), name="liveness", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()
            self.clear()
            if file is not None:
                with suppress(OSError):
                    file.unlink()

    def _write_reports(self, stopped: threading.Event) -> None:
        made = failing = False
        while True:
            if self._file is not None:
                try:
                    if not made:  # once: a run whose folder was deleted must not get an empty one
                        self._file.parent.mkdir(parents=True, exist_ok=True)
                        made = True
                    write_atomically(self._file, json.dumps(self.report()))
                    failing = False
                except OSError as error:
                    if not failing:
                        log.warning("%s (%s) cannot be written: %s", self._file, VARIABLE, error)
                    failing = True
            self.check()
            if stopped.wait(self._every_s):
                return

    def _shard(self, group: str) -> _Shard:
        shard = self._shards.get(group)
        if shard is None:
            with self._lock:
                shard = self._shards.setdefault(group, _Shard(StepBudget()))
        return shard

    def _end_process(self, why: str) -> None:
        _dump_stacks()
        log.critical("%s; this process exits", why)
        self._exit(EXIT_CODE)


def dump_stacks_on_signal() -> None:
    """Let SIGUSR1 write the stacks of all threads to standard error, also if none of them runs Python code."""
    if (errors := cast("Any", sys.__stderr__)) is not None:
        faulthandler.register(signal.SIGUSR1, errors, all_threads=True)


def _dump_stacks() -> None:
    if (errors := cast("Any", sys.__stderr__)) is not None:
        faulthandler.dump_traceback(errors, all_threads=True)


LIVENESS = Liveness()


def alive_file(default: Path) -> Path:
    """The path of this process's liveness file."""
    return Path(named) if (named := os.environ.get(VARIABLE)) else default


def remove_stale_report(environment: Mapping[str, str]) -> None:
    """Remove the liveness file that `environment`, of a process that starts, names.

    A container that starts again has the file of the process before, which may say that it is ready.
    """
    if named := environment.get(VARIABLE):
        with suppress(OSError):
            Path(named).unlink()


def read_liveness(file: Path) -> dict[str, Any] | None:
    """The content of `file`, and `age_s`, the seconds since it was written; None if it cannot be read."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        age = time.time() - file.stat().st_mtime
    except (OSError, ValueError):
        return None
    return {**content, "age_s": round(max(0.0, age), 1)} if isinstance(content, dict) else None


def working_pid(report: Mapping[str, Any] | None) -> int | None:
    """The process that wrote `report` of `read_liveness`; None if it has ended, or is silent."""
    if report is None or report["age_s"] >= SILENT_S:
        return None
    pid = int(report.get("pid") or 0)
    return pid if pid > 0 and Path(f"/proc/{pid}").exists() else None
