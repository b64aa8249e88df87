"""However and whenever a run is ended, it is gone within seconds and has said so."""

from __future__ import annotations

import os
import signal
import time

import pytest
from conftest import StartRun
from laminar_runs import LaminarRun

from infra.kafka.broker import Broker

GONE_WITHIN_S = 8.0
"""The goal is 5 s on two idle cores (benchmarks/startup.py measures it); tests share theirs."""


def stops_cleanly(run: LaminarRun, number: int) -> None:
    """After signal `number` the run ends with its exit code, says why in state.json, and leaves nothing."""
    asked = time.monotonic()
    run.signal(number)
    assert run.wait(GONE_WITHIN_S) == 128 + number
    state = run.state()
    assert state["phase"] == "stopped"
    assert state["error"] == f"stopped by {signal.Signals(number).name} before its goal"
    assert state["ended_at"] >= state["started_at"]
    assert not any(role["alive"] or role["pid"] for role in state["roles"].values())
    run.seconds_until_gone(asked + GONE_WITHIN_S - time.monotonic())


@pytest.mark.parametrize("phase", ["starting", "training", "final evaluation", "draining"])
def test_ctrl_c_ends_a_run_in_every_phase(phase: str, start_run: StartRun, broker: Broker, run_id: str) -> None:
    run = start_run(
        run_id,
        f"kafka.bootstrap_servers={broker.bootstrap_servers}",
        f"trainer.optimizer_steps={2000 if phase == 'training' else 2}",
    )
    run.until_phase(phase)
    stops_cleanly(run, signal.SIGINT)


def test_ctrl_c_ends_a_run_whose_broker_is_starting(start_run: StartRun, run_id: str) -> None:
    run = start_run(run_id)
    run.until((run.folder / "kafka" / "server.properties").exists, what="a broker's start")
    stops_cleanly(run, signal.SIGINT)


def test_a_killed_run_takes_everything_with_it(start_run: StartRun, run_id: str) -> None:
    run = start_run(run_id, "trainer.optimizer_steps=2000")
    run.until_phase("training")
    assert len(run.processes()) >= 11  # the run, its zygote, its broker, eight roles
    run.signal(signal.SIGKILL)
    run.seconds_until_gone(GONE_WITHIN_S)
    assert run.wait() == -signal.SIGKILL


def test_a_killed_zygote_ends_the_run(start_run: StartRun, broker: Broker, run_id: str) -> None:
    run = start_run(run_id, f"kafka.bootstrap_servers={broker.bootstrap_servers}", "trainer.optimizer_steps=2000")
    run.until_phase("training")
    os.kill(run.zygote_pid(), signal.SIGKILL)
    assert run.wait(GONE_WITHIN_S) == 1
    run.seconds_until_gone(1.0)
    assert "the process that starts roles has ended" in run.state()["error"]
    assert run.said().splitlines()[-1].startswith("laminar: the process that starts roles has ended")
