"""The compact layout: kills of its processes, and of all roles in one process at once, lose and repeat nothing."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest
from kills import BROKER, ZYGOTE, kill
from laminar_runs import Command, StartRun
from small_runs import COMPACT, LENGTH_REWARD
from stops import stop_cleanly

from infra.kafka.broker import Broker
from infra.processes import is_running
from pipelines.roles import LIGHT
from pipelines.run.inputs import INPUTS_FILE

PROCESSES = (LIGHT, "rollout-0", "trainer")
STEPS = 28
"""The kills and the stop happen in the first few."""
LIGHT_ROLES = ("prompts", "placement", "score", "experience", "evaluation", "relay")
KILLS = (LIGHT, "rollout-0", "trainer", ZYGOTE, BROKER)


def test_compact_run_survives_kills_of_each_process(start_run: StartRun, run_id: str) -> None:
    changes = (COMPACT, f"trainer.optimizer_steps={STEPS}", "trainer.checkpoint_every=5", LENGTH_REWARD)
    run = start_run(run_id, *changes)
    run.until_phase("training")
    assert set(run.state()["roles"]) == set(PROCESSES)
    log = run.folder / "logs" / f"{LIGHT}.log"

    def have_started(number: int) -> bool:
        """Whether the log has this start of each: a start that is killed before its line has its number, too."""
        text = log.read_text()
        return all(f"start {number} of laminar.{run_id}.{role}.0 " in text for role in LIGHT_ROLES)

    for count, name in enumerate(KILLS, start=1):
        kill(run, name)
        starts = sum(each in (LIGHT, ZYGOTE) for each in KILLS[:count]) + 1  # the roles die with the zygote
        run.until(lambda n=starts: have_started(n), 60, f"start {starts}")  # type: ignore[misc]
    assert {path.name.rpartition("-")[0] for path in run.temporary_files()} <= {"laminar-run", "laminar-audit"}
    assert run.wait(600) == 0, run.output()
    audit = run.audit()
    assert audit["passed"]
    assert (audit["trained"], audit["lost"], audit["trained_twice"]) == (STEPS * 16, 0, 0)
    restarts = {name: role["restarts"] for name, role in run.state()["roles"].items()}
    assert all(restarts[name] >= 2 for name in PROCESSES), restarts  # its own kill and that of the zygote
    assert not run.leftovers()


@pytest.mark.slow
def test_compact_run_stops_on_a_signal_and_resumes_isolated(
    start_run: StartRun, broker: Broker, run_id: str, tmp_path: Path
) -> None:
    servers = f"kafka.bootstrap_servers={broker.bootstrap_servers}"
    (tmp_path / "mine.py").write_text("import beside\n\n\ndef mine(text): return beside.value(text)\n")
    (tmp_path / "beside.py").write_text("def value(text): return 0.0\n")
    reward = LENGTH_REWARD.replace("}}]", f"}}}}, {{name='{tmp_path}/mine.py:mine'}}]")
    run = start_run(run_id, servers, COMPACT, f"trainer.optimizer_steps={STEPS}", reward)
    run.until_phase("training")
    light = psutil.Process(run.pid_of(LIGHT))
    stop_cleanly(run, signal.SIGTERM)
    assert not is_running(light)
    (tmp_path / "beside.py").write_text("def value(text): return 1.0\n")
    refused = Command(run.server, run.here, "runs", "resume", "--run", run_id, output=tmp_path / "refused.txt")
    assert refused.wait() == 1
    assert "1 of the files that the run reads are not as they were at its start" in refused.output()
    assert f"\n    {tmp_path}/beside.py has changed\n" in refused.output()
    run.resume("run.layout=isolated", options=["--accept-changes"])
    assert run.wait(600) == 0, run.output()
    assert [len(each["changes"]) for each in json.loads((run.folder / INPUTS_FILE).read_text())["accepted"]] == [1]
    assert {"score", "experience"} <= set(run.state()["roles"])
    audit = run.audit()
    assert (audit["passed"], audit["trained"], audit["trained_twice"]) == (True, STEPS * 16, 0)
