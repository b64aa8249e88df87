"""Each process of a run is killed: it is started again, nothing is lost and nothing is trained twice.

Nor does it show in the weights: a replay of the batches, which nobody disturbs, gives the same bits.
"""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import StartRun
from kills import ALL, ROLES, ZYGOTE, kill, rounds
from small_runs import LEARNS
from stops import stop_cleanly

from infra.kafka.broker import Broker
from infra.kafka.processes import is_running
from operators.trainer.replay import folder_digest

STEPS = 100
KILLS = 2
"""Kills of each process."""


def test_the_process_that_starts_roles_may_be_killed(start_run: StartRun, broker: Broker, run_id: str) -> None:
    servers, steps = f"kafka.bootstrap_servers={broker.bootstrap_servers}", 30
    run = start_run(run_id, servers, f"trainer.optimizer_steps={steps}")
    run.until_phase("training")
    before = [psutil.Process(pid) for pid in run.role_pids()]
    kill(run, ZYGOTE)
    assert not any(is_running(process) for process in before)
    assert run.wait() == 0, run.said()
    audit = run.audit()
    assert audit["balanced"]
    assert (audit["trained"], audit["lost"], audit["trained_twice"]) == (steps * 16, 0, 0)
    assert [role["restarts"] for role in run.state()["roles"].values()] == [1] * len(ROLES)
    assert "the process that starts roles was ended by SIGKILL" in run.said()
    assert not run.traces()


def test_a_warm_start_that_is_killed_is_begun_again(start_run: StartRun, broker: Broker, run_id: str) -> None:
    servers = f"kafka.bootstrap_servers={broker.bootstrap_servers}"
    run = start_run(run_id, servers, "model.path=''", "warm_start={steps = 100000}")
    progress = run.folder / "warm_start.json"
    run.until(progress.exists, 60, "the warm start")
    kill(run, "warm-start")
    told = progress.stat().st_mtime_ns
    run.until(lambda: progress.stat().st_mtime_ns != told, 60, "the warm start again")
    stop_cleanly(run, signal.SIGINT)


@pytest.mark.timeout(480)
def test_each_process_may_be_killed(start_run: StartRun, run_id: str, model_folder: Path) -> None:
    run = start_run(run_id, f"trainer.optimizer_steps={STEPS}", "trainer.checkpoint_every=5", LEARNS)
    run.until_phase("training")
    for name in itertools.islice(rounds(seed=1), KILLS * len(ALL)):
        kill(run, name)
    assert run.wait(240) == 0, run.said()
    audit = run.audit()
    assert audit["balanced"]
    assert (audit["lost"], audit["trained_twice"], audit["without_reason"], audit["failed"]) == (0, 0, 0, 0)
    assert audit["trained"] == STEPS * 16
    restarts = {name: role["restarts"] for name, role in run.state()["roles"].items()}
    assert all(restarts[role] >= 2 * KILLS for role in ROLES), restarts  # its own, and those of the zygote
    assert "the broker has died; starting it again" in run.said()
    assert not run.traces()
    command = [sys.executable, "-c", "from pipelines.cli.main import main; main()"]
    words = ["train", "replay", run.name, "--folder", str(run.folder.parent), "--json"]
    replay = subprocess.run([*command, *words], capture_output=True, text=True, check=False, timeout=150)
    assert replay.returncode == 0, replay.stderr
    told = json.loads(replay.stdout)
    assert (told["steps"], told["weights"]) == (STEPS, told["weights_of_run"])
    assert told["weights"] != folder_digest(model_folder)
