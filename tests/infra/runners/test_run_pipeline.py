"""A pipeline runs to its end or to a signal, and what it held is let go of either way."""

from __future__ import annotations

import os
import signal
import threading

import apache_beam as beam
import pytest

from infra.runners.run import run_pipeline
from infra.runners.stopping import STOPPING, stopping_on_signals

SEEN: list[int] = []


def note(number: int) -> None:
    SEEN.append(number)
    if number == 2:
        os.kill(os.getpid(), signal.SIGTERM)


def fail(number: int) -> None:
    raise ValueError(f"cannot take {number}")


def handlers() -> list[object]:
    return [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)]


def test_it_runs_to_its_end_and_a_signal_is_a_wish() -> None:
    SEEN.clear()
    before, closed = handlers(), []
    run_pipeline(lambda p: p | beam.Create([1, 2, 3]) | beam.Map(note), close=lambda: closed.append(STOPPING.is_set()))
    assert (sorted(SEEN), closed) == ([1, 2, 3], [True])
    assert (handlers(), STOPPING.is_set()) == (before, False)


def test_what_fails_is_raised_and_all_is_closed() -> None:
    before, closed = handlers(), []
    with pytest.raises(Exception, match="cannot take 7"):
        run_pipeline(lambda p: p | beam.Create([7]) | beam.Map(fail), close=lambda: closed.append(1))
    assert (closed, handlers()) == ([1], before)


def test_options_reach_the_pipeline() -> None:
    seen = []
    run_pipeline(
        lambda p: seen.append(p.options.get_all_options()["job_name"]) or p | beam.Create([1]),
        beam_options=["--job_name=mine"],
    )
    assert seen == ["mine"]


def test_who_waits_for_a_job_server_hears_signals_too() -> None:
    closed, elsewhere = [], ["--job_endpoint=127.0.0.1:1"]
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    run_pipeline(lambda p: p | beam.Create([1]) | beam.Map(fail), "portable", elsewhere, lambda: closed.append(1))
    timer.join()
    assert closed == [1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_both_signals_ask_to_stop(number: signal.Signals) -> None:
    with stopping_on_signals():
        os.kill(os.getpid(), number)
        assert STOPPING.wait(1)
    assert not STOPPING.is_set()
