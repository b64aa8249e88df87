"""Liveness and progress: a process that works reports; one that does not, ends."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.runners.liveness import EXIT_CODE, Liveness, StepBudget, read_liveness


class Ended:
    """What `os._exit` would have been called with."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def __call__(self, code: int) -> None:
        self.codes.append(code)


@pytest.fixture
def ended() -> Ended:
    return Ended()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the condition has not come true"
        time.sleep(0.005)


def test_report_is_rewritten_while_a_step_takes_long(tmp_path: Path, ended: Ended) -> None:
    live, file = Liveness(end=ended, every_s=0.01), tmp_path / "alive" / "trainer.json"
    live.set_budget("g", StepBudget(fold_s=60))
    with live.reporting(file):
        until(file.exists)  # before any step: loading a model takes its time
        with live.step("g", "fold"):
            until(lambda: read_liveness(file)["steps"])  # type: ignore[index]
            os.utime(file, (0, 0))
            until(lambda: file.stat().st_mtime > 0)
            said = read_liveness(file)
            assert said is not None
            assert said["steps"]["g"]["phase"] == "fold"
            assert (said["steps"]["g"]["budget_s"], said["steps"]["g"]["stalled"]) == (60, False)
        until(lambda: not read_liveness(file)["steps"])  # type: ignore[index]
    assert not file.exists()
    assert not ended.codes


def test_process_is_ready_once_its_step_is_restored(ended: Ended) -> None:
    live = Liveness(end=ended)
    assert not live.report()["ready"]
    with live.step("g", "restore"):
        assert not live.report()["ready"]
    assert live.report()["ready"]
    with live.step("g", "fold"):
        assert live.report()["ready"]
    assert json.dumps(live.report()).count('"ready": true') == 1  # what the readiness probe greps for


@pytest.mark.parametrize(("phase", "seconds"), [("restore", 40.0), ("fold", 3.0)])
def test_step_ends_the_process_only_beyond_its_own_budget(
    ended: Ended, caplog: pytest.LogCaptureFixture, phase: str, seconds: float
) -> None:
    now = 0.0
    live = Liveness(clock=lambda: now, end=ended)
    live.set_budget("g", StepBudget(restore_s=40.0, fold_s=3.0, setting="progress.score_s"))
    with live.step("g", phase):  # type: ignore[arg-type]
        now = seconds
        live.check()
        assert not ended.codes
        now = seconds + 1
        live.check()
        live.check()
    assert ended.codes == [EXIT_CODE]
    assert f"`{phase}` of g has taken {seconds + 1:.0f} s" in caplog.text
    assert "raise progress.score_s" in caplog.text


def test_stalled_step_is_only_reported_where_restart_is_off(ended: Ended, caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    live = Liveness(clock=lambda: now, end=ended)
    live.set_budget("g", StepBudget(fold_s=3.0, restart=False))
    with live.step("g", "fold"):
        now = 5.0
        live.check()
        live.check()
        assert live.report()["steps"]["g"]["stalled"]
    assert not ended.codes
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_failed_vital_thread_ends_the_process(ended: Ended) -> None:
    live = Liveness(end=ended)

    def fail() -> None:
        raise RuntimeError("no more")

    live.start_thread("fine", lambda: None).join()
    live.check()
    assert not ended.codes
    live.start_thread("sink", fail).join()
    live.check()
    assert live.report()["failed_threads"] == {"sink": "RuntimeError('no more')"}
    assert ended.codes == [EXIT_CODE]


def test_unwritable_report_is_logged_once_and_ends_nothing(
    tmp_path: Path, ended: Ended, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    live, checked = Liveness(end=ended, every_s=0.01), threading.Event()
    check, count = live.check, 0

    def counted() -> None:
        nonlocal count
        check()
        count += 1
        if count == 3:
            checked.set()

    live.check = counted  # type: ignore[method-assign]
    with live.reporting(tmp_path / "file" / "alive"):
        assert checked.wait(30)
    assert len(caplog.records) == 1
    assert not ended.codes


def test_damaged_report_reads_as_none(tmp_path: Path) -> None:
    assert read_liveness(tmp_path / "none") is None
    (tmp_path / "half").write_text('{"pid": 1')
    assert read_liveness(tmp_path / "half") is None
