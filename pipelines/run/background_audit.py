"""Audits of a run while it works, one after the other, so that a loss shows within the hour and not at the end.

An audit reads the log from its beginning, or from the trim point of the last trim. The pause after it is a multiple of
the time it took, so that audits take a bounded share of one core however long the run is.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from infra.processes import is_running, spawn, stop_process

PAUSES = 20.0
"""The pause after an audit, in times that it took: at most a twentieth of one core."""
_NAMED = ("lost", "trained_twice", "without_reason", "contradictions")


class BackgroundAudit:
    """Starts audits of the run of `config_file`, the first after `every_s` seconds; `note` takes one-line news.

    `found` gets the numbers of each audit. Nothing is started where `every_s` is 0.
    """

    def __init__(
        self,
        config_file: Path,
        every_s: float,
        note: Callable[[str], None],
        found: Callable[[Mapping[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config_file, self._every_s, self._note, self._found, self._clock = (
            config_file,
            every_s,
            note,
            found,
            clock,
        )
        self._out = config_file.with_name("audit-so-far.json")
        self._log = config_file.with_name("logs") / "audit.log"
        self._process: psutil.Process | None = None
        self._began = clock()
        self._due = clock() + every_s
        self._last: tuple[int, ...] = ()

    def tend(self) -> None:
        """Start an audit that is due, and take in one that has ended. Call it often."""
        if self._process is not None:
            if not is_running(self._process):
                self._take_in()
        elif self._every_s and self._clock() >= self._due:
            self._began = self._clock()
            self._out.unlink(missing_ok=True)
            module = "pipelines.inspect.audit.background_process"
            command = [sys.executable, "-m", module, str(self._config_file), str(self._out)]
            self._process = spawn(command, self._log, die_with_parent=True)

    def close(self) -> None:
        """End an audit that is under way."""
        if self._process is not None:
            stop_process(self._process, 0)
            self._process = None

    def _take_in(self) -> None:
        self._process = None
        took = self._clock() - self._began
        self._due = self._clock() + max(self._every_s, PAUSES * took)
        if not self._out.exists():
            self._note(f"an audit of the run so far failed: see {self._log}")
            return
        audit = json.loads(self._out.read_text())
        self._found({name: number for name, number in audit.items() if isinstance(number, int)} | {"took_s": took})
        counts = tuple(audit[name] for name in _NAMED)
        if not audit["passed"] and counts != self._last:  # said once for each new finding
            says = ", ".join(
                f"{count} {name.replace('_', ' ')}" for name, count in zip(_NAMED, counts, strict=True) if count
            )
            self._note(f"the audit of the run so far FAILED: {says or 'its sums differ'}; {self._out} names them")
        self._last = counts
