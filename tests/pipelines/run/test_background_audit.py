"""Background audits: when they start and what they report."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipelines.inspect.audit.result import Audit
from pipelines.inspect.run_files import AUDIT_SO_FAR_FILE
from pipelines.run import background_audit
from pipelines.run.background_audit import PAUSE_FACTOR, BackgroundAudit


class Scripted:
    """Replaces the audit processes: each takes a second and writes the next of `results`; None: nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, *results: dict[str, Any] | None) -> None:
        self.now, self.starts, self.results = 0.0, [], list(results)
        self.notes: list[str] = []
        self.found: list[Mapping[str, Any]] = []
        monkeypatch.setattr(background_audit, "spawn", self._spawn)
        monkeypatch.setattr(background_audit, "is_running", lambda process: False)
        self.audits = BackgroundAudit(
            folder / "config.toml", 10.0, self.notes.append, self.found.append, lambda: self.now
        )

    def _spawn(self, command: list[str], log: Path, *, die_with_parent: bool) -> psutil.Process:
        assert die_with_parent
        self.starts.append(self.now)
        if (result := self.results.pop(0)) is not None:
            Path(command[-1]).write_text(json.dumps(result))
        return psutil.Process()

    def advance_to(self, end: int) -> None:
        while self.now < end:
            self.now += 1
            self.audits.poll()


def result(**changes: Any) -> dict[str, Any]:
    return Audit(dispatched=7, trained=7).to_json() | changes


def test_background_audit_pauses_for_a_multiple_of_its_duration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = time.time()
    run = Scripted(monkeypatch, tmp_path, result(), result())
    run.advance_to(10 + 1 + int(PAUSE_FACTOR) + 1)
    assert run.starts == [10, 11 + PAUSE_FACTOR]
    assert (run.notes, run.found[0]["trained"], run.found[0]["took_s"]) == ([], 7, 1)
    assert before <= run.found[0]["ended_at"] <= time.time()


def test_background_audit_reports_a_new_finding_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lost = result(passed=False, lost=2)
    run = Scripted(monkeypatch, tmp_path, lost, lost, result(passed=False, lost=2, trained_twice=1))
    run.advance_to(60)
    assert [note.partition(";")[0] for note in run.notes] == [
        "the background audit FAILED: 2 lost",
        "the background audit FAILED: 2 lost, 1 trained twice",
    ]


def test_background_audit_that_ends_without_a_result_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = Scripted(monkeypatch, tmp_path, None, None, result())
    run.advance_to(70)
    assert (tmp_path / AUDIT_SO_FAR_FILE).exists()
    assert run.notes == [f"the background audit did not finish: see {tmp_path / 'logs' / 'audit.log'}"]


def test_audit_that_cannot_start_is_noted_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = Scripted(monkeypatch, tmp_path)

    def no_process(*arguments: Any, **options: Any) -> psutil.Process:
        run.starts.append(run.now)
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(background_audit, "spawn", no_process)
    run.advance_to(200)
    assert len(run.starts) > 2
    assert run.notes == ["the background audit did not finish: [Errno 11] Resource temporarily unavailable"]


def test_ended_audit_leaves_no_zombie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = Scripted(monkeypatch, tmp_path, None)
    child = subprocess.Popen(["true"])
    monkeypatch.setattr(background_audit, "spawn", lambda *arguments, **options: psutil.Process(child.pid))
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    run.advance_to(12)
    assert not psutil.pid_exists(child.pid)
    child.returncode = 0  # it was waited for
