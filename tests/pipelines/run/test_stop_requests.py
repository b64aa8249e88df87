"""Stop requests: deferred to safe points, or raised at once in interruptible blocks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from pipelines.run import stop_requests
from pipelines.run.stop_requests import FORCED_EXIT_AFTER, REPEATED_AFTER_S, Interrupted, StopRequests


@pytest.fixture
def stops() -> Iterator[StopRequests]:
    with StopRequests() as stops:
        yield stops


def test_stop_requests_raise_nothing_without_a_signal(stops: StopRequests) -> None:
    stops.check()
    with stops.interruptible():
        pass


def test_stop_requests_defer_a_signal_to_the_next_check(stops: StopRequests) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM") as interrupted:
        stops.check()
    assert interrupted.value.exit_code == 143


def test_interruptible_block_raises_at_once(stops: StopRequests) -> None:
    completed = []

    def call() -> None:
        with stops.interruptible():
            os.kill(os.getpid(), signal.SIGINT)
            completed.append("the end of the call")

    with pytest.raises(Interrupted):
        call()
    assert not completed


def test_interruptible_block_does_not_begin_after_a_request(stops: StopRequests) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(Interrupted), stops.interruptible():
        pytest.fail("it began")


def test_cleanup_of_interruptible_block_is_not_interrupted(
    stops: StopRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_requests, "REPEATED_AFTER_S", 0.0)
    cleaned = []

    def call() -> None:
        with stops.interruptible():
            try:
                os.kill(os.getpid(), signal.SIGINT)
            finally:
                os.kill(os.getpid(), signal.SIGINT)
                cleaned.append("up")

    with pytest.raises(Interrupted):
        call()
    assert cleaned == ["up"]


def test_stop_requests_restore_the_signal_handlers() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopRequests():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def run_code(code: str) -> int:
    code = "import os, signal\nfrom pipelines.run.stop_requests import *\n" + code
    return subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode


def test_signals_of_one_closed_terminal_are_one_request(stops: StopRequests, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for _ in ("of the terminal", "of its shell"):
        os.kill(os.getpid(), signal.SIGHUP)
    assert not stops.repeated
    now += REPEATED_AFTER_S
    os.kill(os.getpid(), signal.SIGINT)
    assert stops.repeated


def test_third_stop_request_exits_at_once() -> None:
    kills = "os.kill(os.getpid(), signal.SIGINT)\n" * FORCED_EXIT_AFTER
    setup = "from pipelines.run import stop_requests\nstop_requests.REPEATED_AFTER_S = 0\nStopRequests().__enter__()\n"
    assert run_code(f"{setup}{kills}os._exit(0)") == 130


@pytest.mark.parametrize(("final", "code"), [("True", 0), ("False", -signal.SIGHUP)])
def test_final_stop_requests_ignore_later_signals(final: str, code: int) -> None:
    kills = "import atexit\natexit.register(os.kill, os.getpid(), signal.SIGHUP)\n"
    assert run_code(f"{kills}with StopRequests(final={final}): pass") == code


def test_stop_requests_keep_signals_ignored_by_the_parent() -> None:
    code = """
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with StopRequests() as stops:
    os.kill(os.getpid(), signal.SIGHUP)
    stops.check()
os._exit(7)
"""
    assert run_code(code) == 7


def test_stop_requests_redirect_output_of_a_closed_terminal() -> None:
    code = """
import pty, sys
ours, theirs = pty.openpty()
os.dup2(theirs, 1)
os.close(theirs)
with StopRequests() as stops:
    os.kill(os.getpid(), signal.SIGHUP)
    os.close(ours)
    print("to nobody", flush=True)  # an error on a terminal that is gone
os._exit(7)
"""
    assert run_code(code) == 7


def test_error_that_a_library_made_of_an_interruption_is_one() -> None:
    code = """
with StopRequests() as stops:
    try:
        with stops.interruptible():
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except Exception:
                raise KeyError("as a thread that is interrupted in its start")
    except Interrupted as interrupted:
        os._exit(interrupted.exit_code)
"""
    assert run_code(code) == 130
    code = """
with StopRequests() as stops:
    try:
        with stops.interruptible():
            raise KeyError("without a request")
    except KeyError:
        os._exit(7)
"""
    assert run_code(code) == 7
