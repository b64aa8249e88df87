"""Requests to stop: held, or heeded at once where nothing is half done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pipelines.run.stop_requests import FORCED_EXIT_AFTER, Interrupted, StopRequests


@pytest.fixture
def stops() -> Iterator[StopRequests]:
    with StopRequests() as stops:
        yield stops


def test_nothing_is_raised_while_nobody_asks(stops: StopRequests) -> None:
    stops.check()
    with stops.interruptible():
        pass


def test_a_request_is_held_until_it_is_looked_for(stops: StopRequests) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM") as interrupted:
        stops.check()
    assert interrupted.value.exit_code == 143


def test_a_long_call_is_given_up_at_once(stops: StopRequests) -> None:
    reached = []

    def call() -> None:
        with stops.interruptible():
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("the end of the call")

    with pytest.raises(Interrupted):
        call()
    assert not reached


def test_a_request_from_before_a_long_call_keeps_it_from_beginning(stops: StopRequests) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(Interrupted), stops.interruptible():
        pytest.fail("it began")


def test_what_cleans_up_is_not_interrupted(stops: StopRequests) -> None:
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


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopRequests():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def run_code(code: str) -> int:
    code = "import os, signal\nfrom pipelines.run.stop_requests import *\n" + code
    return subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode


def test_whoever_asks_thrice_does_not_wait() -> None:
    asks = "os.kill(os.getpid(), signal.SIGINT)\n" * FORCED_EXIT_AFTER
    assert run_code(f"StopRequests().__enter__()\n{asks}os._exit(0)") == 130


@pytest.mark.parametrize(("final", "code"), [("True", 0), ("False", -signal.SIGHUP)])
def test_who_is_at_the_end_is_not_to_be_stopped(final: str, code: int) -> None:
    asks = "import atexit\natexit.register(os.kill, os.getpid(), signal.SIGHUP)\n"
    assert run_code(f"{asks}with StopRequests(final={final}): pass") == code


def test_what_the_parent_has_had_ignored_stays_ignored() -> None:
    code = """
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with StopRequests() as stops:
    os.kill(os.getpid(), signal.SIGHUP)
    stops.check()
os._exit(7)
"""
    assert run_code(code) == 7


def test_a_terminal_that_goes_away_is_written_to_no_more() -> None:
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
