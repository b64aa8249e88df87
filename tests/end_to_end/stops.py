"""Asking a run to stop, and what must then be true."""

from __future__ import annotations

import random
import signal
import time

from laminar_runs import LaminarRun

GONE_WITHIN_S = 8.0
"""The goal is 5 s on two idle cores (benchmarks/startup.py measures it); tests share theirs."""


def stop_cleanly(run: LaminarRun, number: int) -> float:
    """After signal `number` the run ends with its exit code, says why in state.json, and leaves nothing: in seconds."""
    asked = time.monotonic()
    assert stop(run, number) == "stopped"
    return time.monotonic() - asked


def stop(run: LaminarRun, number: int) -> str:
    """The phase in which signal `number` leaves a run, of which nothing else is left.

    Where its books were made already, it ends as if nobody had asked, with all that a run leaves.
    """
    asked = time.monotonic()
    run.signal(number)
    code = run.wait(GONE_WITHIN_S)
    state = run.state()
    if code == 0:
        assert (state["phase"], state["error"]) == ("ended", None)
        assert all((run.folder / name).exists() for name in ("audit.json", "summary.json", "report.html"))
    else:
        assert code == 128 + number, f"{code}: {run.said()[-2000:]}"
        assert state["phase"] == "stopped"
        assert state["error"] == f"stopped by {signal.Signals(number).name} before its goal"
    assert state["ended_at"] >= state["started_at"]
    assert not any(role["alive"] or role["pid"] for role in state["roles"].values())
    run.seconds_until_gone(asked + GONE_WITHIN_S - time.monotonic())
    return str(state["phase"])


def stop_at_a_random_moment(run: LaminarRun, seed: int, within_s: float = 12.0) -> str:
    """Ctrl-C at some moment of a run's first `within_s` seconds: the phase in which it came; it may be over by then."""
    run.until(run.state, 30, "its state")
    time.sleep(random.Random(seed).uniform(0, within_s))
    phase = str(run.state()["phase"])
    if run.exit_code() is None:
        stop(run, signal.SIGINT)
    else:
        assert run.wait() == 0
    return phase
