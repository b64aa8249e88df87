"""A run whose rollouts and trainer share three devices, which move to the rollouts and back with a price.

Only a whole run has the trainer's ranks that end with a checkpoint and start again in another number.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import tomli_w
from laminar_runs import CommandServer, LaminarRun
from small_runs import LENGTH_REWARD, SMALL, make_model
from test_hand_over import assert_passed, written

from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from schemas.records import ScalingDecision, WeightVersion
from schemas.topics import RELAY, SCALING

STEPS = 150


@pytest.mark.slow
def test_devices_move_between_trainer_and_rollouts(
    command_server: CommandServer, broker: Broker, run_id: str, tmp_path: Path
) -> None:
    client = ClientProperties.at(broker.bootstrap_servers)
    config, prices = tmp_path / "small.toml", tmp_path / "price.csv"
    prices.write_text("price\n2.5\n")
    changes = {
        "run": {"layout": "compact"},
        "kafka": {"bootstrap_servers": broker.bootstrap_servers},
        "model": {"path": str(make_model(tmp_path / "model"))},
        "placement": {"max_replicas": 2},
        "trainer": {**SMALL["trainer"], "optimizer_steps": STEPS, "ranks": 2, "batch_shares": 2},
        "autoscaling": {
            "devices": 3,
            "policy": "price",
            "price_file": str(prices),
            "prices": [{"price": 1.0, "processes": 2}],
            "observe_s": 0.5,
            "stable_s": 1.0,
            "cooldown_s": 2.0,
        },
    }
    config.write_text(tomli_w.dumps({**SMALL, **changes}))
    run = LaminarRun(command_server, tmp_path / "run", config, run_id, LENGTH_REWARD)

    def processes(kind: str) -> list[str]:
        return [name for name, role in run.state()["roles"].items() if name.startswith(kind) and role["alive"]]

    def trained() -> int:
        return max((each.version.number for each in written(client, run, RELAY, WeightVersion)), default=0)

    try:
        run.pid_of("trainer-1", 90)
        run.until(lambda: trained() > 3, 60, "steps of two ranks")
        assert processes("rollout") == ["rollout-0"]
        prices.write_text("price\n0.5\n")
        run.until(lambda: processes("rollout") == ["rollout-0", "rollout-1"], 90, "a second rollout")
        assert processes("trainer") == ["trainer"]
        run.signal(signal.SIGKILL)
        run.wait()
        run.resume()
        before = trained()
        run.until(lambda: trained() > before + 3, 90, "steps of one rank after the kill")
        assert (processes("rollout"), processes("trainer")) == (["rollout-0", "rollout-1"], ["trainer"])
        prices.write_text("price\n2.5\n")
        run.until(lambda: processes("trainer") == ["trainer", "trainer-1"], 90, "a second rank")
        assert processes("rollout") == ["rollout-0"]
        assert_passed(run, STEPS * 16)
    finally:
        run.clean_up()
    decisions = list(written(client, run, SCALING, ScalingDecision))
    assert [(each.before, each.target) for each in decisions] == [(1, 2), (2, 1)]
    assert json.loads((run.folder / "audit.json").read_text())["lost"] == 0
