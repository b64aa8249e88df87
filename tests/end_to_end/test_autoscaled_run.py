"""A run whose rollouts follow a price: one more process starts, the autoscaler is killed, and the process leaves again.

Only a whole run has the autoscaler, the supervisor that follows it, and a rollout that hands its work over.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomli_w
from kills import kill
from laminar_runs import CommandServer, LaminarRun
from small_runs import EMULATED
from test_hand_over import assert_passed, written

from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from pipelines.cli.autoscale import autoscale, scaling_line
from pipelines.cli.options import Address, Printing
from pipelines.roles import LIGHT
from schemas.records import ReplicaStatus, ScalingDecision, ScalingOutcome, Trajectory
from schemas.topics import REPLICAS, SCALING, TRAJECTORIES

STEPS = 28
"""The second decision comes about half way: a step takes a second at least."""


@pytest.mark.slow
def test_run_follows_a_price_and_loses_nothing(
    command_server: CommandServer, broker: Broker, run_id: str, tmp_path: Path
) -> None:
    client = ClientProperties.at(broker.bootstrap_servers)
    config, prices = tmp_path / "emulated.toml", tmp_path / "price.csv"
    prices.write_text("price\n0.5\n")
    changes = {
        "run": {"time_scale": 8.0, "layout": "compact"},
        "kafka": {"bootstrap_servers": broker.bootstrap_servers},
        "rollout": {**EMULATED["rollout"], "replicas": 1, "heartbeat_s": 0.5, "termination_notice_s": 20.0},
        "trainer": {"optimizer_steps": STEPS, "emulation": {"step_s": [[0, 10], [100_000, 20]]}},
        "autoscaling": {
            "policy": "price",
            "price_file": str(prices),
            "prices": [{"price": 1.0, "processes": 2}],
            "maximum": 2,
            "observe_s": 0.5,
            "stable_s": 1.0,
            "cooldown_s": 3.0,
        },
    }
    config.write_text(tomli_w.dumps({**EMULATED, **changes}))
    run = LaminarRun(command_server, tmp_path / "run", config, run_id)

    def outcomes() -> list[ScalingOutcome]:
        """Those of decisions that were carried out; others say that a process that starts slowly is asked for again."""
        found = list(written(client, run, SCALING, ScalingOutcome))
        assert all("it is asked again" in each.error for each in found if each.error)
        return [each for each in found if not each.error]

    try:
        run.pid_of("rollout-1", 90)
        run.until(lambda: len(outcomes()) == 1, 60, "the outcome of the first decision")
        worked = run.until(
            lambda: [each for each in written(client, run, TRAJECTORIES, Trajectory) if each.replica == 1],
            60,
            "a trajectory of the second process",
        )
        assert worked
        kill(run, LIGHT)
        prices.write_text("price\n2.5\n")
        run.until(lambda: len(outcomes()) == 2, 90, "the outcome of the second decision")
        run.until(lambda: run.state()["roles"]["rollout-1"]["status"] == "ended", 60, "the end of rollout-1")
        assert_passed(run, STEPS * 32)
    finally:
        run.clean_up()
    decisions = list(written(client, run, SCALING, ScalingDecision))
    assert [(each.number, each.before, each.target) for each in decisions] == [(1, 1, 2), (2, 2, 1)]
    assert len(outcomes()) == 2
    states = [each.state for each in written(client, run, REPLICAS, ReplicaStatus) if each.replica == 1]
    assert states[-1] == "stopped"
    assert "draining" in states
    rows = autoscale(Address(broker.bootstrap_servers, None, run_id), Printing(), 20, False)
    lines = [scaling_line(row) for part in rows.parts for row in part]
    assert list(dict.fromkeys(line.split(" decision ")[1].partition(":")[0] for line in lines)) == ["1", "2"]
    assert "1 → 2 rollout processes, price: the price is 0.5, at most 1" in lines[0]
    assert json.loads((run.folder / "audit.json").read_text())["lost"] == 0
