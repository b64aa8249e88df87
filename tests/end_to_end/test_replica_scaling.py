"""A run is paused; a replica joins and receives work after the pause; another drains, its work resumes elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w
from laminar_runs import Command, CommandServer, LaminarRun
from small_runs import EMULATED
from test_hand_over import assert_passed, written

from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from pipelines.cli.options import Address
from pipelines.cli.pauses import pause_command, unpause_command
from schemas.records import Assignment, Metric, Pause, ReplicaStatus, Trajectory
from schemas.topics import CONTROL, INBOX, METRICS, REPLICAS, TRAJECTORIES

JOINED, DRAINED = 2, 0


@pytest.mark.slow
def test_run_is_paused_while_a_rollout_joins_and_another_drains(
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
    address = Address(broker.bootstrap_servers, None, run_id)

    def assignments() -> list[Assignment]:
        return list(written(client, run, INBOX, Assignment))

    def beats() -> list[ReplicaStatus]:
        return list(written(client, run, REPLICAS, ReplicaStatus))

    def assignments_of(replica: int) -> list[Assignment]:
        return [each for each in assignments() if each.replica == replica]

    try:
        run.pid_of("rollout-0", 90)  # the topics exist by then
        run.until(assignments, 60, "assignments")
        paused = pause_command(address, reason="a replica joins", wait=60.0)
        assert paused.exit_code == 0, paused.text()
        begun = {each.trajectory_id for each in assignments()}
        joining = Command(
            command_server,
            tmp_path / "joining",
            "submit",
            "rollout",
            str(run.folder / "config.toml"),
            "--replica",
            str(JOINED),
        )
        run.until(lambda: any(each.replica == JOINED for each in beats()), 60, "a heartbeat of the joined replica")
        assert "is paused since" in pause_command(address).text()
        run.until(lambda: "paused since" in run.output(), 30, "a line about the pause")
        assert {each.trajectory_id for each in assignments()} == begun
        assert begun <= {each.trajectory_id for each in written(client, run, TRAJECTORIES, Trajectory)}
        assert unpause_command(address).data["confirmed"]
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
    ended = next(each.requested_at for each in written(client, run, CONTROL, Pause) if not each.paused)
    first = min(each.assigned_at for each in assignments_of(JOINED))
    mine = [each for each in beats() if each.replica == JOINED and each.state == "running"]
    assert sum(ended < each.sent_at < first for each in mine) <= 10
    metrics = [each for each in written(client, run, METRICS, Metric) if each.name == "pause"]
    assert [each.values["running"] for each in metrics if each.values["paused"]][-1] == 0
    assert (metrics[-1].step, metrics[-1].values) == (2, {"paused": 0.0})
