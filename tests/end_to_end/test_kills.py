"""Each process of a run is killed: it is started again, nothing is lost and nothing is trained twice.

Nor does it show in the weights: a replay of the batches, which nobody disturbs, gives the same bits.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

from conftest import StartRun
from kills import ROLES, kill, rounds

STEPS = 150


def test_each_process_may_be_killed(start_run: StartRun, run_id: str) -> None:
    run = start_run(run_id, f"trainer.optimizer_steps={STEPS}", "trainer.checkpoint_every=5")
    run.until_phase("training")
    for name in itertools.islice(rounds(seed=1), len(ROLES) + 1):
        kill(run, name)
    assert run.wait(150) == 0, run.said()
    audit = run.audit()
    assert audit["balanced"]
    assert (audit["lost"], audit["trained_twice"], audit["without_reason"], audit["failed"]) == (0, 0, 0, 0)
    assert audit["trained"] == STEPS * 16
    restarts = {name: role["restarts"] for name, role in run.state()["roles"].items()}
    assert all(restarts[role] >= 1 for role in ROLES), restarts
    assert "the broker has died; starting it again" in run.said()
    assert not run.traces()
    command = [sys.executable, "-c", "from pipelines.cli.main import main; main()"]
    words = ["train", "replay", run.name, "--folder", str(run.folder.parent), "--json"]
    replay = subprocess.run([*command, *words], capture_output=True, text=True, check=False, timeout=150)
    assert replay.returncode == 0, replay.stderr
    told = json.loads(replay.stdout)
    assert (told["steps"], told["weights"]) == (STEPS, told["weights_of_run"])
