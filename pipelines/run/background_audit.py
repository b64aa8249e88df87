"""Audits of an active run, one after the other, so that a loss is reported within the hour and not at the end.

An audit reads the log from its beginning, or from the last trim point. The pause after an audit is a multiple of
its duration, so that audits take a bounded share of one core for a run of any length.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from infra.processes import is_running, reap, spawn, stop_process
from pipelines.distribution import PYTHON
from pipelines.inspect.audit.result import FINDINGS, findings_text
from pipelines.inspect.run_files import AUDIT_SO_FAR_FILE, LOGS

RETRY_S = 60.0
PAUSE_FACTOR = 20.0
"""Pause after an audit, as a multiple of its duration: audits use at most a twentieth of one core."""


class BackgroundAudit:
    """Starts audits of the run of `config_file`, the first after `every_s` seconds; none if `every_s` is 0.

    The newest result is in `folder`, by default that of `config_file`, where `laminar runs status` finds it. `note`
    receives one-line messages, `report` the counts of each audit, its duration and the time of its end. `laminar run`
    has one of these; of a submitted run the respawner of the trainer, of a deployed run the process that serves its
    metrics.
    """

    def __init__(
        self,
        config_file: Path,
        every_s: float,
        note: Callable[[str], None],
        report: Callable[[Mapping[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
        folder: Path | None = None,
    ) -> None:
        self._config_file, self._every_s, self._clock = config_file, every_s, clock
        self._note, self._report = note, report
        folder = folder or config_file.parent
        self._out = folder / AUDIT_SO_FAR_FILE
        self._new = self._out.with_suffix(".new")
        self._log = folder / LOGS / "audit.log"
        self._process: psutil.Process | None = None
        self._started_at = clock()
        self._due = clock() + every_s
        self._last_counts: tuple[int, ...] = ()
        self._finished = True

    def poll(self) -> None:
        """Start an audit that is due and handle one that has ended. Call it often; a failure of it is only noted."""
        try:
            self._poll()
        except OSError as error:  # no process or no space is left, or the folder is gone
            self._due = self._clock() + max(self._every_s, RETRY_S)
            self._note_unfinished(str(error))

    def _poll(self) -> None:
        if self._process is not None:
            if not is_running(self._process):
                self._handle_result()
        elif self._every_s and self._clock() >= self._due:
            self._started_at = self._clock()
            self._new.unlink(missing_ok=True)
            module = "pipelines.inspect.audit.background_process"
            command = [*PYTHON, "-m", module, str(self._config_file), str(self._new)]
            self._process = spawn(command, self._log, die_with_parent=True)

    def close(self) -> None:
        """Stop an active audit."""
        if self._process is not None:
            stop_process(self._process, 0)
            self._process = None

    def _note_unfinished(self, reason: str) -> None:
        if self._finished:  # repeated failures are noted once
            self._note(f"the background audit did not finish: {reason}")
        self._finished = False

    def _handle_result(self) -> None:
        if self._process is not None:
            reap(self._process, 1.0)  # else it remains as a zombie
        self._process = None
        took = self._clock() - self._started_at
        self._due = self._clock() + max(self._every_s, PAUSE_FACTOR * took)
        if not self._new.exists():
            self._note_unfinished(f"see {self._log}")
            return
        self._finished = True
        self._new.replace(self._out)
        audit = json.loads(self._out.read_text())
        counts_of_it = {name: number for name, number in audit.items() if isinstance(number, int)}
        self._report(counts_of_it | {"took_s": took, "ended_at": time.time()})
        counts = tuple(audit[name] for name in FINDINGS)
        if not audit["passed"] and counts != self._last_counts:  # each finding is reported once
            self._note(f"the background audit FAILED: {findings_text(audit)}; details: {self._out}")
        self._last_counts = counts
