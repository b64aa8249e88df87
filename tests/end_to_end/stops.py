"""Stops a run by a signal and checks the result."""

from __future__ import annotations

import random
import re
import signal
import time

from laminar_runs import LaminarRun

from pipelines.inspect.run_folders import read_run

GONE_WITHIN_S = 30.0
"""The goal is 1 s on two idle cores (measured by benchmarks/startup.py); tests share their cores."""


def stop_cleanly(run: LaminarRun, number: int) -> float:
    """Stop `run` by signal `number` and check exit code, state.json and leftovers. Returns the seconds it took."""
    requested_at = time.monotonic()
    assert stop(run, number) == "stopped"
    return time.monotonic() - requested_at


def stop(run: LaminarRun, number: int) -> str:
    """Send signal `number` and return the run's last phase; check that no processes are left.

    A run whose audit is complete ends as without a signal, with all its files.
    """
    requested_at = time.monotonic()
    run.signal(number)
    code = run.wait(GONE_WITHIN_S)
    state = run.state()
    if code == 0:
        assert (state["phase"], state["error"]) == ("ended", None)
        assert all((run.folder / name).exists() for name in ("audit.json", "summary.json", "report.html"))
    else:
        assert code == 128 + number, f"{code}: {run.output()[-2000:]}"
        assert (state["phase"], read_run(run.folder).status) == ("stopped", "stopped")
        assert re.fullmatch(rf"stopped by .+ \({signal.Signals(number).name}\) before its goal", state["error"])
    assert state["ended_at"] >= state["started_at"]
    assert not any(role["alive"] or role["pid"] for role in state["roles"].values())
    run.seconds_until_gone(requested_at + GONE_WITHIN_S - time.monotonic())
    return str(state["phase"])


def stop_at_random_time(run: LaminarRun, seed: int, within_s: float = 12.0) -> str:
    """Ctrl-C at a random time in a run's first `within_s` seconds. Returns the phase; the run may have ended before."""
    run.until(run.state, 30, "its state")
    time.sleep(random.Random(seed).uniform(0, within_s))
    phase = str(run.state()["phase"])
    if run.exit_code() is None:
        stop(run, signal.SIGINT)
    else:
        assert run.wait() == 0
    return phase
