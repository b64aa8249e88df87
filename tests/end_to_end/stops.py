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
    run.signal(number)
    assert run.wait(GONE_WITHIN_S) == 128 + number
    state = run.state()
    assert state["phase"] == "stopped"
    assert state["error"] == f"stopped by {signal.Signals(number).name} before its goal"
    assert state["ended_at"] >= state["started_at"]
    assert not any(role["alive"] or role["pid"] for role in state["roles"].values())
    run.seconds_until_gone(asked + GONE_WITHIN_S - time.monotonic())
    return time.monotonic() - asked


def stop_at_a_random_moment(run: LaminarRun, seed: int, within_s: float = 12.0) -> str:
    """Ctrl-C at some moment of a run's first `within_s` seconds: the phase in which it came; it may be over by then."""
    run.until(run.state, 30, "its state")
    time.sleep(random.Random(seed).uniform(0, within_s))
    phase = str(run.state()["phase"])
    if run.exit_code() is None and phase not in ("audit", "ended"):
        stop_cleanly(run, signal.SIGINT)
    else:
        assert run.wait() == 0
    return phase
