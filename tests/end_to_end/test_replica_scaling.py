"""A replica joins an active run and receives assignments; another drains, and its trajectories resume elsewhere."""

from __future__ import annotations

from pathlib import Path

import tomli_w
from laminar_runs import Command, CommandServer, LaminarRun
from small_runs import EMULATED
from test_hand_over import assert_passed, written

from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from schemas.records import Assignment, ReplicaStatus
from schemas.topics import INBOX, REPLICAS

JOINED, DRAINED = 2, 0


def test_rollout_joins_and_another_drains(
    command_server: CommandServer, broker: Broker, run_id: str, tmp_path: Path
) -> None:
    client = ClientProperties.at(broker.bootstrap_servers)
    config = tmp_path / "emulated.toml"
    changes = {
        "run": {"time_scale": 5.0},
        "kafka": {"bootstrap_servers": broker.bootstrap_servers},
        "rollout": {**EMULATED["rollout"], "processes": 2, "replicas": 1, "heartbeat_s": 1.0},
        "placement": {"max_replicas": 3},
        "trainer": {"optimizer_steps": 12, "emulation": {"step_s": [[0, 1], [100_000, 2]]}},
    }
    config.write_text(tomli_w.dumps({**EMULATED, **changes}))
    run = LaminarRun(command_server, tmp_path / "run", config, run_id)
    joining = draining = None

    def assignments_of(replica: int) -> list[Assignment]:
        return [each for each in written(client, run, INBOX, Assignment) if each.replica == replica]

    try:
        run.until_phase("training")
        joining = Command(
            command_server,
            tmp_path / "joining",
            "submit",
            "rollout",
            str(run.folder / "config.toml"),
            "--replica",
            str(JOINED),
        )
        run.until(lambda: assignments_of(JOINED), 60, "assignments for the joined replica")
        draining = Command(
            command_server,
            tmp_path / "draining",
            *("replicas", "drain", str(DRAINED), "--run", run_id, "--bootstrap-server", broker.bootstrap_servers),
            *("--wait", "60"),
        )
        assert draining.wait(90) == 0, draining.output()
        before = len(assignments_of(DRAINED))
        assert_passed(run, 12 * 32)
    finally:
        for each in (run, joining, draining):
            if each is not None:
                each.clean_up()
    assert len(assignments_of(DRAINED)) == before
    beats = [each for each in written(client, run, REPLICAS, ReplicaStatus) if each.replica == JOINED]
    first = min(each.assigned_at for each in assignments_of(JOINED))
    assert sum(each.state == "running" and each.sent_at < first for each in beats) <= 2
