"""Each process of a run is killed: it is started again, nothing is lost and nothing is trained twice."""

from __future__ import annotations

import itertools

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
