"""A host joins a run with Kafka's address, a relay and a token, and makes all of its trajectories."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from laminar_runs import Command, CommandServer, kill_processes_in
from small_runs import LENGTH_REWARD, SMALL, make_model

from infra.kafka.broker import Broker
from infra.kafka.topic_reader import read_rows
from pipelines.config import load_config
from pipelines.distribution import LAMINAR
from pipelines.inspect.audit.audit_run import audit
from pipelines.run.topics import make_topics
from schemas.records import Settled, Trajectory, WeightVersion
from schemas.topics import RELAY, SETTLED, TRAJECTORIES

REPOSITORY = Path(__file__).parents[2]
STEPS = 2
REPLICA = 3
OWN = ("--set", "relay.token_file=token", "--set", "relay.store=store")
"""What the host has of its own."""
HIDES = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"')
"""Starts a command that sees an empty folder in the place of its first argument."""


def hiding(folder: Path) -> list[str]:
    """The beginning of a command that cannot see into `folder`, where this user can start one."""
    if subprocess.run([*HIDES, str(folder), "true"], check=False, capture_output=True).returncode:
        return []
    return [*HIDES, str(folder)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_host_joins_with_an_address_a_relay_and_a_token(
    command_server: CommandServer, broker: Broker, run_id: str, tmp_path: Path
) -> None:
    here, host = tmp_path / "run", tmp_path / "host"
    for folder in (here, host):
        folder.mkdir()
        (folder / "token").write_text("cd" * 16)
    settings = {
        **SMALL,
        "run": {"name": run_id, "folder": str(here / "runs")},
        "kafka": {"bootstrap_servers": broker.bootstrap_servers},
        "model": {"path": str(make_model(here / "model"))},
        "prompts": {**SMALL["prompts"], "heldout": 0},
        "trainer": {"optimizer_steps": STEPS, "checkpoint_every": 9},
        "relay": {"store": str(here / "store"), "token_file": str(here / "token")},
    }
    file = here / "config.toml"
    file.write_text(tomli_w.dumps(settings))
    config = load_config(file)
    client = config.kafka.client()
    make_topics(config)

    def rows(topic: Any, kind: type) -> list[Any]:
        return list(read_rows(client, topic.name(run_id), kind))

    with ExitStack() as stack:
        stack.callback(lambda: kill_processes_in([host, *here.iterdir()]))
        own = [
            Command(command_server, here / f"{role}-process", "submit", role, str(file), "--set", LENGTH_REWARD)
            for role in ("placement", "trainer", "prompts", "score", "experience")
        ]
        address = f"kafka://{broker.bootstrap_servers}/{run_id}"
        started = [
            subprocess.Popen(
                [*hiding(here), *LAMINAR, "submit", role, address, *options, *OWN],
                cwd=host,
                env={"PATH": os.environ["PATH"], "HOME": str(host), "PYTHONPATH": str(REPOSITORY)},
                stdout=stack.enter_context((host / f"{role}.txt").open("wb")),
                stderr=subprocess.STDOUT,
            )
            for role, options in (("relay", ["--machine", "gpu-7"]), ("rollout", ["--replica", str(REPLICA)]))
        ]

        def outputs() -> str:
            texts = [each.output()[-2000:] for each in own]
            return "\n".join([*texts, *(file.read_text()[-4000:] for file in host.glob("*.txt"))])

        def is_reached() -> bool:
            if any(each.final for each in rows(RELAY, WeightVersion)):
                return True
            assert all(each.exit_code() is None for each in own), outputs()
            assert all(each.poll() is None for each in started), outputs()
            return False

        deadline = time.monotonic() + 400
        while not is_reached():
            assert time.monotonic() < deadline, outputs()
            time.sleep(0.5)
        for process in started:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(90) for process in started] == [0, 0], outputs()
        for each in own:
            each.signal(signal.SIGTERM)
        assert [each.wait() for each in own] == [0] * len(own), outputs()
    trained = {name for each in rows(SETTLED, Settled) if each.outcome == "batched" for name in [each.trajectory_id]}
    made = {each.trajectory_id: each.replica for each in rows(TRAJECTORIES, Trajectory)}
    assert len(trained) >= STEPS * 16
    assert {made[name] for name in trained} == {REPLICA}
    assert not list(host.glob(f"runs/{run_id}/*/*.safetensors"))
    saved = [each.read_text() for each in host.glob(f"runs/{run_id}/submitted/*.toml")]
    assert len(saved) == len(started)
    assert not any(str(here) in each for each in saved)
    found = audit(client, run_id)
    assert found.passed, found
