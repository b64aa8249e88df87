"""A run that is stopped by a signal, in any phase, ends within seconds and records it in state.json."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from first_day import printed_commands
from laminar_runs import REPOSITORY, Command, StartRun
from small_runs import COMPACT
from stops import GONE_WITHIN_S, stop, stop_cleanly

from infra.kafka.broker import Broker, BrokerConfig, start_broker
from infra.models.checkpoint_list import list_checkpoints
from pipelines.cli.options import Address
from pipelines.cli.pauses import pause_command, unpause_command
from pipelines.inspect.metrics_file import read_metrics
from pipelines.present.report.series import evaluations

STEPS = 24
"""Steps of a run that is killed twice before it reaches its goal."""


@pytest.mark.parametrize("phase", ["starting", "training", "draining"])
def test_ctrl_c_stops_a_run_in_every_phase(
    phase: str, start_run: StartRun, broker: Broker, run_id: str, tmp_path: Path
) -> None:
    servers = f"kafka.bootstrap_servers={broker.bootstrap_servers}"
    steps = f"trainer.optimizer_steps={2 if phase == 'draining' else 2000}"
    changes = (steps,) if phase == "training" else (COMPACT, steps)
    run = start_run(run_id, servers, *changes)
    run.until_phase(phase)
    if phase == "training":
        run.until(run.checkpoints, 240, "a checkpoint")
    last = stop(run, signal.SIGINT)
    assert last == "stopped" or phase == "draining"  # drain and audit may end before the signal arrives
    if phase == "draining" and last == "stopped":  # as its message says
        (words,) = [words for words in printed_commands(run.output()) if words[:2] == ["runs", "resume"]]
        run.start_again(*words)
        assert run.wait() == 0, run.output()
        assert run.audit()["trained"] == 2 * 16
    if phase == "training":  # the newest version is kept: it can be pulled, and its batches are not trained again
        assert list_checkpoints(run.folder / "checkpoints")
        steps = json.loads((run.folder / "summary.json").read_text())["optimizer_steps"]
        replay = Command(run.server, run.here, "train", "replay", run_id, output=tmp_path / "replay.txt")
        assert replay.wait() == 0, replay.output()
        assert f"{steps} step{'s' * (steps != 1)} in " in replay.output()  # of a goal of 2,000


@pytest.mark.parametrize(
    ("number", "phase", "last_phases"),
    [(signal.SIGINT, "audit", {"stopped", "ended"}), (signal.SIGTERM, "ended", {"ended"})],
)
def test_signal_after_the_drain_leaves_all_files(
    number: int,
    phase: str,
    last_phases: set[str],
    start_run: StartRun,
    emulated_config: Path,
    broker: Broker,
    run_id: str,
) -> None:
    servers = f"kafka.bootstrap_servers={broker.bootstrap_servers}"
    run = start_run(run_id, servers, "trainer.optimizer_steps=2", config=emulated_config)
    run.until_phase(phase)  # "ended": the report is not written yet
    assert stop(run, number) in last_phases


def test_ctrl_c_stops_a_run_with_a_starting_broker(start_run: StartRun, run_id: str, tmp_path: Path) -> None:
    """Its check takes a minute: it has no topics then, even if the broker is up before the signal."""
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\ndef mine(text): return 1.0\n")
    slow = (f"score.rewards=[{{name='{tmp_path}/slow.py:mine'}}]", "run.check_timeout_s=120")
    run = start_run(run_id, *slow)
    run.until((run.folder / "kafka" / "server.properties").exists, 60, "a broker's start")
    stop_cleanly(run, signal.SIGINT)
    again = start_run(run_id, *slow, here=run.here)  # it has no topics: its name is free
    again.until(lambda: again.state().get("pid") == again.pid, 60, "another run of the same name")
    stop_cleanly(again, signal.SIGINT)


def test_ctrl_c_stops_a_warm_start(start_run: StartRun, broker: Broker, run_id: str) -> None:
    servers = f"kafka.bootstrap_servers={broker.bootstrap_servers}"
    run = start_run(run_id, servers, "model.path=''", "warm_start={steps = 100000}")
    run.until((run.folder / "warm_start.json").exists, 60, "the warm start")
    stop_cleanly(run, signal.SIGINT)


@pytest.mark.parametrize(("number", "phase"), [(signal.SIGTERM, "starting"), (signal.SIGHUP, "checks")])
def test_other_stop_signals_stop_a_run(
    number: int, phase: str, start_run: StartRun, broker: Broker, run_id: str
) -> None:
    run = start_run(run_id, f"kafka.bootstrap_servers={broker.bootstrap_servers}")
    run.until_phase(phase)
    stop_cleanly(run, number)


def test_ctrl_c_stops_a_run_without_kafka(
    start_run: StartRun, run_id: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with start_broker(BrokerConfig(tmp_path_factory.mktemp("kafka"))) as stopped_broker:
        run = start_run(
            run_id, f"kafka.bootstrap_servers={stopped_broker.bootstrap_servers}", "trainer.optimizer_steps=2000"
        )
        run.until_phase("training")
        stopped_broker.kill()
        run.until(lambda: "does not answer" in run.output(), 60, "an outage that the run has noticed")
        stop_cleanly(run, signal.SIGINT)


@pytest.mark.slow
def test_run_starts_audits_and_fails_after_a_long_outage(
    start_run: StartRun, emulated_config: Path, run_id: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with start_broker(BrokerConfig(tmp_path_factory.mktemp("kafka"))) as stopped_broker:
        servers = stopped_broker.bootstrap_servers
        limits = ("kafka.outage_timeout_s=10", "run.audit_every_s=0.5", "trainer.optimizer_steps=20000")
        run = start_run(run_id, f"kafka.bootstrap_servers={servers}", *limits, config=emulated_config)
        run.until_phase("training")
        run.until((run.folder / "logs" / "audit.log").exists, 60, "an audit during the run")
        stopped_broker.kill()
        assert run.wait(60) == 1
    assert re.search(
        rf"^laminar: Kafka at {servers} has not answered for \d+ s: .*Connection refused", run.output(), re.M
    )
    assert f"Kafka at {servers} does not answer: " in run.output()
    assert run.state()["phase"] == "failed"
    run.seconds_until_gone(GONE_WITHIN_S)


@pytest.mark.slow
def test_killed_run_cleans_up_and_resumes(start_run: StartRun, run_id: str, tmp_path: Path) -> None:
    """The second time from a backup, as docs/operations.md describes it: only a copy of the run's folder is left.

    The run is paused then, and still paused when it has resumed.
    """
    run = start_run(run_id, f"trainer.optimizer_steps={STEPS}")
    run.until(run.checkpoints, 240, "a checkpoint")
    assert len(run.processes()) >= 11  # the supervisor, the zygote, the broker, eight roles
    run.signal(signal.SIGKILL)
    run.seconds_until_gone(GONE_WITHIN_S)
    assert run.wait() == -signal.SIGKILL
    started_at = run.state()["started_at"]
    run.resume()
    run.until(run.weights, 120, "its weights")
    run.until(lambda: run.state()["phase"] == "training", 120, "its training")
    assert pause_command(Address(run.state()["bootstrap_servers"], None, run_id)).data["confirmed"]
    run.clean_up()  # kills all processes at once, so nothing cleans up
    assert run.wait() == -signal.SIGKILL
    weights = run.weights()
    assert weights
    shutil.copytree(run.folder, tmp_path / "backup", symlinks=True)
    shutil.rmtree(run.folder)
    shutil.rmtree(weights[0].parent)
    shutil.copytree(tmp_path / "backup", run.folder, symlinks=True)
    run.resume()
    run.until(lambda: run.state()["phase"] == "training", 120, "its training")
    address = Address(run.state()["bootstrap_servers"], None, run_id)
    assert not pause_command(address).data["changed"]
    assert unpause_command(address).data["confirmed"]
    assert run.wait() == 0, run.output()
    audit = run.audit()
    assert (audit["passed"], audit["trained"], audit["lost"]) == (True, STEPS * 16, 0)
    assert (run.state()["started_at"], run.state()["phase"]) == (started_at, "ended")
    assert not run.leftovers()


@pytest.mark.slow
def test_drill_of_the_docs_restores_a_lost_run(start_run: StartRun, run_id: str, tmp_path: Path) -> None:
    """The commands of docs/operations.md, with this run's name and folder of backups."""
    run = start_run(run_id, f"trainer.optimizer_steps={2 * STEPS}")
    run.until(run.checkpoints, 240, "a checkpoint")
    (tmp_path / "backup").mkdir()
    for number, words in enumerate(drill(run_id, tmp_path / "backup")):
        if words[0] != "laminar":
            subprocess.run(words, cwd=run.here, check=True)
        elif words[1:3] == ["runs", "resume"]:
            run.start_again(*words[1:])
            run.until(lambda: run.state()["phase"] == "training", 120, "its training")
        else:
            if words[1:3] == ["runs", "audit"]:
                assert run.wait(240) == 0, run.output()
            command = Command(run.server, run.here, *words[1:], output=tmp_path / f"drill-{number}.txt")
            assert command.wait() == 0, command.output()
    audit = run.audit()
    assert (audit["passed"], audit["trained"], audit["lost"]) == (True, 2 * STEPS * 16, 0)


def test_drill_of_the_docs_has_the_run_and_the_backup(tmp_path: Path) -> None:
    lines = drill("mine", tmp_path)
    assert lines[0] == ["laminar", "runs", "pause", "--run", "mine", "--wait", "3600"]
    assert ["cp", "-a", f"{tmp_path}/mine", "runs/mine"] in lines
    assert lines[-1] == ["laminar", "runs", "audit", "--run", "mine"]


def drill(run: str, backup: Path) -> list[list[str]]:
    """The commands of the drill in docs/operations.md, for a run and a folder of backups."""
    text = (REPOSITORY / "docs" / "operations.md").read_text(encoding="utf-8")
    block = text.partition("\nDrill (")[2].partition("```\n")[2].partition("```")[0]
    placed = re.sub(r"\bfirst\b", run, block).replace("/backup/", f"{backup}/")
    return [shlex.split(line, comments=True) for line in placed.splitlines()]


@pytest.mark.slow
def test_reached_run_is_extended(start_run: StartRun, broker: Broker, run_id: str, tmp_path: Path) -> None:
    """At first with a reward that fails in the checks: the run stays as it was, and the printed command extends it."""
    servers, reward = f"kafka.bootstrap_servers={broker.bootstrap_servers}", tmp_path / "mine.py"
    reward.write_text("def mine(text): return len(text) / 100\n")
    run = start_run(run_id, servers, COMPACT, "trainer.optimizer_steps=2", f"score.rewards=[{{name='{reward}:mine'}}]")
    assert run.wait() == 0, run.output()
    reward.write_text("def mine(text): return len(txt) / 100\n")
    run.resume("trainer.optimizer_steps=4", options=["--accept-changes"])
    assert run.wait() == 1
    assert "NameError: name 'txt' is not defined" in run.output()
    assert run.state()["phase"] == "ended"
    assert (run.audit()["trained"], (run.folder / "summary.json").exists()) == (2 * 16, True)
    assert (run.folder / "model").is_dir()
    reward.write_text("def mine(text): return len(text) / 50\n")
    words = [words for words in printed_commands(run.output()) if words[:2] == ["runs", "resume"]][-1]
    before = len(run.output())
    run.start_again(*words)
    assert run.wait() == 0, run.output()
    starting = [line for line in run.output()[before:].splitlines() if line.startswith("[") and "] starting" in line]
    assert starting  # a resumed run shows its progress while it starts
    assert all("waits for " in line for line in starting)
    audit, summary = run.audit(), json.loads((run.folder / "summary.json").read_text())
    assert (audit["passed"], audit["trained"], audit["lost"]) == (True, 4 * 16, 0)
    assert (summary["optimizer_steps"], summary["optimizer_steps_goal"]) == (4, 4)
    finals = [each for each in evaluations(read_metrics(run.folder / "metrics.jsonl")) if each.final]
    assert [each.version for each in finals] == [2, 4]
    assert {"model", "model-2"} <= {path.name for path in run.folder.iterdir()}
    assert not run.leftovers()
