"""Liveness and progress: a working process reports, a stalled or failed one exits."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.runners.liveness import EXIT_CODE, Liveness, StepBudget, read_liveness


class ExitCodes:
    """Records the codes passed to `os._exit`."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def __call__(self, code: int) -> None:
        self.codes.append(code)


@pytest.fixture
def exits() -> ExitCodes:
    return ExitCodes()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.005)


def test_liveness_file_is_rewritten_during_a_long_step(tmp_path: Path, exits: ExitCodes) -> None:
    liveness, file = Liveness(end=exits, every_s=0.01), tmp_path / "alive" / "trainer.json"
    liveness.set_budget("g", StepBudget(fold_s=60))
    with liveness.reporting(file):
        until(file.exists)  # before any step: loading a model takes long
        with liveness.step("g", "fold"):
            until(lambda: read_liveness(file)["steps"])  # type: ignore[index]
            os.utime(file, (0, 0))
            until(lambda: file.stat().st_mtime > 0)
            content = read_liveness(file)
            assert content is not None
            assert content["steps"]["g"]["phase"] == "fold"
            assert (content["steps"]["g"]["budget_s"], content["steps"]["g"]["stalled"]) == (60, False)
        until(lambda: not read_liveness(file)["steps"])  # type: ignore[index]
    assert not file.exists()
    assert not exits.codes


def test_liveness_does_not_restore_a_deleted_folder(
    tmp_path: Path, exits: ExitCodes, caplog: pytest.LogCaptureFixture
) -> None:
    """The run's supervisor ends it by the absence of its folder."""
    file = tmp_path / "run" / "alive" / "trainer.json"
    with Liveness(end=exits, every_s=0.01).reporting(file):
        until(file.exists)
        file.parent.parent.rename(tmp_path / "deleted")
        until(lambda: "cannot be written" in caplog.text)
    assert not file.parent.parent.exists()


def test_liveness_is_ready_once_the_step_is_restored(exits: ExitCodes) -> None:
    liveness = Liveness(end=exits)
    assert not liveness.report()["ready"]
    with liveness.step("g", "restore"):
        assert not liveness.report()["ready"]
    assert liveness.report()["ready"]
    with liveness.step("g", "fold"):
        assert liveness.report()["ready"]
    assert json.dumps(liveness.report()).count('"ready": true') == 1  # the readiness probe greps for this


def test_liveness_is_ready_if_the_steps_run_elsewhere(tmp_path: Path, exits: ExitCodes) -> None:
    """A process that has submitted a job for EXTERNAL workers has no shards itself."""
    liveness = Liveness(end=exits)
    liveness.set_steps_elsewhere()
    assert liveness.report()["ready"]
    with liveness.reporting(tmp_path / "alive.json"):
        assert not liveness.report()["ready"], "the next job is not submitted yet"


@pytest.mark.parametrize(("phase", "seconds"), [("restore", 40.0), ("fold", 3.0)])
def test_liveness_exits_when_a_step_exceeds_its_budget(
    exits: ExitCodes, caplog: pytest.LogCaptureFixture, phase: str, seconds: float
) -> None:
    now = 0.0
    liveness = Liveness(clock=lambda: now, end=exits)
    liveness.set_budget("g", StepBudget(restore_s=40.0, fold_s=3.0, setting="progress.score_s"))
    with liveness.step("g", phase):  # type: ignore[arg-type]
        now = seconds
        liveness.check()
        assert not exits.codes
        now = seconds + 1
        liveness.check()
        liveness.check()
    assert exits.codes == [EXIT_CODE]
    assert f"`{phase}` of g has taken {seconds + 1:.0f} s" in caplog.text
    assert "raise progress.score_s" in caplog.text


def test_liveness_only_logs_a_stalled_step_without_restart(exits: ExitCodes, caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    liveness = Liveness(clock=lambda: now, end=exits)
    liveness.set_budget("g", StepBudget(fold_s=3.0, restart=False))
    with liveness.step("g", "fold"):
        now = 5.0
        liveness.check()
        liveness.check()
        assert liveness.report()["steps"]["g"]["stalled"]
    assert not exits.codes
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_liveness_exits_when_a_vital_thread_has_failed(exits: ExitCodes) -> None:
    liveness = Liveness(end=exits)

    def fail() -> None:
        raise RuntimeError("no more")

    liveness.start_thread("fine", lambda: None).join()
    liveness.check()
    assert not exits.codes
    liveness.start_thread("sink", fail).join()
    liveness.check()
    assert liveness.report()["failed_threads"] == {"sink": "RuntimeError('no more')"}
    assert exits.codes == [EXIT_CODE]


def test_liveness_logs_an_unwritable_file_once(
    tmp_path: Path, exits: ExitCodes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    liveness, checked = Liveness(end=exits, every_s=0.01), threading.Event()
    check, count = liveness.check, 0

    def counted_check() -> None:
        nonlocal count
        check()
        count += 1
        if count == 3:
            checked.set()

    liveness.check = counted_check  # type: ignore[method-assign]
    with liveness.reporting(tmp_path / "file" / "alive"):
        assert checked.wait(30)
    assert len(caplog.records) == 1
    assert not exits.codes


def test_read_liveness_returns_none_for_a_damaged_file(tmp_path: Path) -> None:
    assert read_liveness(tmp_path / "none") is None
    (tmp_path / "half").write_text('{"pid": 1')
    assert read_liveness(tmp_path / "half") is None


def test_signal_writes_the_stacks_of_a_process_that_works_on() -> None:
    code = """if True:
        from infra.runners.liveness import dump_stacks_on_signal
        import threading
        dump_stacks_on_signal()
        inside = threading.Event()
        def waits_in_a_thread():
            inside.set()
            threading.Event().wait()
        threading.Thread(target=waits_in_a_thread, daemon=True).start()
        inside.wait()
        print("ready", flush=True)
        print(input(), flush=True)
    """
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        out, err = process.communicate("works on\n", 30)
    assert out == "works on\n"
    assert "in waits_in_a_thread" in err
