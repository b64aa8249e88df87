"""Runs that cannot learn: they are stopped or refused with the reason, and never end as a success."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from functools import partial
from pathlib import Path

import pytest
from first_day import printed_commands
from laminar_runs import Command, CommandServer, LaminarRun, StartRun
from small_runs import COMPACT

from infra.kafka.admin import admin_client, list_topics
from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from pipelines.inspect.metrics_file import read_metrics
from schemas.topics import run_prefix

REWARDS = """
def fails_later(text, prompt):
    return {}["answr"]


def fails_often(text, reference, prompt):
    return len(text) + (1 if sum(map(ord, prompt)) % 2 else {}["answr"])


def gives_text(text, prompt):
    return "1.0" if sum(map(ord, prompt)) % 2 else float("nan")


def constant(tokens):
    return 1.0


def fails_sometimes(tokens):
    return tokens + (1 if tokens % 3 else {}["answr"])
"""


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rewards") / "mine.py"
    file.write_text(REWARDS)
    return file


UNCHECKED = "run.check_timeout_s=0"
"""The checks before the start would find these errors."""


def reward(file: Path, name: str) -> str:
    return f"score.rewards=[{{name='{file}:{name}'}}]"


def asked(server: CommandServer, run: LaminarRun, *arguments: str) -> str:
    """What a command prints in the folder of the test."""
    before = len(run.output())
    command = Command(server, run.here, *arguments)
    command.wait()
    return command.output()[before:]


def test_run_is_stopped_when_every_reward_fails(
    start_run: StartRun, command_server: CommandServer, rewards: Path, run_id: str
) -> None:
    run = start_run(run_id, reward(rewards, "fails_later"), "run.stop_error_window=24", UNCHECKED, COMPACT)
    assert run.wait() == 1
    output = run.output()
    error = output[output.index("laminar: ") :]
    assert error.startswith("laminar: the run was stopped, because it cannot learn: errors in 100 % of ")
    assert "The first error, of trajectory " in error
    assert "fails_later: KeyError: 'answr' (mine.py:3)" in error
    assert f'File "{rewards}", line 3, in fails_later' in error
    assert "reached its goal" not in output
    assert run.state()["phase"] == "failed"
    assert "fails_later: KeyError" in run.state()["error"]
    assert any(metric.name == "score" for metric in read_metrics(run.folder / "metrics.jsonl"))
    summary = json.loads((run.folder / "summary.json").read_text())
    assert (summary["reached"], summary["error_share"]) == (False, 1.0)
    page = (run.folder / "report.html").read_text()
    assert "fails_later: KeyError" in page
    assert "Errors in 100 % of " in page
    assert f"its report: runs/{run_id}/report.html" in output
    assert run.leftovers() == []

    ask = partial(asked, command_server, run)
    status = json.loads(ask("runs", "status", "--run", run_id, "--json"))
    assert status["error_share"] == 1.0
    assert "errors      100 % of " in ask("runs", "status", "--run", run_id)
    (words,) = [words for words in printed_commands(error) if words[0] == "topics"]  # as the error says
    assert "fails_later: KeyError" in ask(*words)
    compared = ask("runs", "compare", run_id, run_id)
    assert re.search(r"^share of trajectories with an error +1(\.0+)? ", compared, re.M)
    scored, failed, share = served(command_server, run, "score_trajectories", "score_reward_errors", "error_share")
    assert (scored == failed > 0, share) == (True, 1.0)
    assert "reward 0.00" in ask("samples", "--run", run_id)
    assert "starting Apache Kafka" not in run.output().partition("laminar: ")[2]  # the log was read from its files


def served(server: CommandServer, run: LaminarRun, *names: str) -> list[float]:
    """The metrics `names` of `run`, from `laminar metrics serve`."""
    command = Command(server, run.here, "metrics", "serve", "--port", "0", "--run", run.name)
    address = command.until(lambda: re.search(r"http://\S+/metrics", command.output()), 60, "its address")[0]
    with urllib.request.urlopen(address, timeout=30) as response:
        metrics = response.read().decode()
    command.signal(signal.SIGINT)
    command.wait(30)
    return [float(re.search(rf"^laminar_{name}{{.*}} (\S+)$", metrics, re.M)[1]) for name in names]  # type: ignore[index]


@pytest.mark.parametrize(
    ("on_error", "equal", "warning"),
    [
        (
            "0",
            "(0.00), so nothing could be learned: give partial credit",
            "every reward is 0 in up to 2 optimizer steps",
        ),
        ("0.5", "(0.50), so nothing could be learned", "rewards do not differ within any group in up to 2 optimizer"),
    ],
)
def test_short_run_of_errors_exits_with_1(
    on_error: str, equal: str, warning: str, start_run: StartRun, rewards: Path, broker: Broker, run_id: str
) -> None:
    """Half of the rewards are text, half NaN."""
    unlimited = ("run.stop_error_window=0", "run.warn_steps=2")
    changes = (UNCHECKED, *unlimited, "trainer.optimizer_steps=2", "prompts.heldout=0", f"score.on_error={on_error}")
    servers = f"kafka.bootstrap_servers={broker.bootstrap_servers}"
    run = start_run(run_id, servers, COMPACT, reward(rewards, "gives_text"), *changes)
    assert run.wait() == 1
    output = run.output()
    assert f"Run {run_id} FAILED: its trajectories have errors" in output
    assert "Errors in 100 % of" in output
    assert "were trained with score.on_error" in output
    assert f"All rewards were equal {equal}" in output
    assert f"Warning: {warning}" in output
    assert "reached its goal" not in output
    summary = json.loads((run.folder / "summary.json").read_text())
    assert (summary["reached"], summary["error_share"]) == (False, 1.0)
    page = (run.folder / "report.html").read_text()
    assert "FAILED: its trajectories have errors" in page
    assert "<td>goal reached</td><td>no</td>" in page
    assert "reached its goal" not in page


def test_share_of_errors_and_steps_before_a_warning_are_settings(
    start_run: StartRun, rewards: Path, broker: Broker, run_id: str
) -> None:
    """Every other prompt fails; no update has a gradient, because the correction leaves no token."""
    nothing = '{name="icepop", correction="mask", correction_low=50.0, correction_cap=60.0}'
    run = start_run(
        run_id,
        f"kafka.bootstrap_servers={broker.bootstrap_servers}",
        COMPACT,
        reward(rewards, "fails_often"),
        UNCHECKED,
        "run.stop_error_share=0.3",
        "run.stop_error_window=160",
        "run.warn_steps=1",
        "trainer.optimizer_steps=200",
        f"trainer.learner.algorithm={nothing}",
    )
    assert run.wait() == 1
    output = run.output()
    assert re.search(r"cannot learn: errors in [3-9]\d % of \d+ trajectories \(rewards \d+\) of the newest", output)
    assert re.search(r"^\[.* steps .*  errors \d+ % of \d+ trajectories \(rewards ", output, re.M)
    assert "warning: the gradient was 0 in the last " in output


@pytest.mark.slow
def test_run_whose_questions_end_is_stopped_and_resumes(
    start_run: StartRun,
    command_server: CommandServer,
    rewards: Path,
    emulated_config: Path,
    broker: Broker,
    run_id: str,
) -> None:
    """There are enough for the goal, but trajectories with errors are not trained."""
    servers = f"kafka.bootstrap_servers={broker.bootstrap_servers}"
    questions = ("prompts.size=32", "prompts.epochs=1", UNCHECKED)
    run = start_run(run_id, servers, reward(rewards, "fails_sometimes"), *questions, config=emulated_config)
    assert run.wait() == 1
    output = run.output()
    assert "waits for nothing: all 32 questions are drawn (prompts.epochs)" in output
    found = re.search(r"the run was stopped after (\d) of 4 optimizer steps: all 32 questions are drawn", output)
    assert found is not None, output
    assert int(found[1]) < 4
    assert "no trajectory is left to train; errors in " in output
    assert "fails_sometimes: KeyError: 'answr' (mine.py:19)" in output
    assert (run.folder / "report.html").exists()
    (words,) = [words for words in printed_commands(output) if words[:2] == ["runs", "resume"]]
    assert words[-2] == "--set"
    resumed = Command(command_server, run.here, *words)
    assert resumed.wait() == 0, resumed.output()
    assert run.audit()["trained"] >= 4 * 32


@pytest.mark.slow
def test_run_whose_groups_are_all_dropped_warns(
    start_run: StartRun, rewards: Path, emulated_config: Path, broker: Broker, run_id: str
) -> None:
    servers = f"kafka.bootstrap_servers={broker.bootstrap_servers}"
    settings = (reward(rewards, "constant"), "experience.sampler={name='dynamic'}", "run.warn_steps=2", UNCHECKED)
    run = start_run(run_id, servers, *settings, config=emulated_config)
    dropped = r"\d+ trajectories were dropped since the last batch \(all rewards of the group are equal\)"
    run.until(lambda: re.search(rf"^warning: {dropped}, and no batch is full: ", run.output(), re.M), 90, "a warning")
    run.until(lambda: re.search(f"waits for the first optimizer step: {dropped}", run.output()), 60, "its line")
    run.signal(signal.SIGINT)
    assert run.wait() == 130
    (warning,) = json.loads((run.folder / "summary.json").read_text())["warnings"]
    assert re.match(dropped, warning)


ENVIRONMENT = """
class Broken:
    def reset(self, prompt):
        return prompt["refrence"]

    def step(self, text):
        return "", 1.0, True, {}
"""


def test_start_names_all_problems_before_a_topic_exists(
    start_run: StartRun, rewards: Path, broker: Broker, run_id: str, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(ENVIRONMENT)
    run = start_run(
        run_id,
        reward(rewards, "fails_later"),
        f"rollout.environments=[{{name='{tmp_path}/broken.py:Broken'}}]",
        "prompts.environment=Broken",
        "prompts.size=4",
        f"kafka.bootstrap_servers={broker.bootstrap_servers}",
    )
    assert run.wait() == 1
    first, *details = run.output().split("laminar: ")[-1].splitlines()
    assert first == "the run cannot start: 3 problems"
    text = "\n".join(details)
    assert "  prompts: heldout = 8 leaves none of the 4 distinct questions" in text
    assert "KeyError: 'answr' (mine.py:3)" in text
    assert f'File "{rewards}", line 3, in fails_later' in text
    assert "rollout.environments: Broken fails at its reset on each of the first 4 prompts: KeyError" in text
    assert "KeyError: 'refrence'" in text
    with admin_client(ClientProperties.at(broker.bootstrap_servers)) as admin:
        assert list_topics(admin, run_prefix(run_id)) == []
    assert not (run.folder / "config.toml").exists()
    assert run.leftovers() == []


def test_environment_that_fails_later_stops_the_run(
    start_run: StartRun, command_server: CommandServer, broker: Broker, run_id: str, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(ENVIRONMENT)
    run = start_run(
        run_id,
        f"kafka.bootstrap_servers={broker.bootstrap_servers}",
        COMPACT,
        f"rollout.environments=[{{name='{tmp_path}/broken.py:Broken'}}]",
        "prompts.environment=Broken",
        UNCHECKED,
    )
    assert run.wait() == 1
    output = run.output()
    assert re.search(r"^\[.*\] (starting|training) .*waits for (?!Kafka|the check)", output, re.M)
    assert "the run was stopped, because it cannot learn: errors in 100 % of " in output
    assert re.search(r"^\[.* errors .*\(episodes ", output, re.M)
    assert f'File "{tmp_path}/broken.py", line 4, in reset' in output
    ask = partial(asked, command_server, run)
    status = json.loads(ask("runs", "status", "--run", run_id, "--json"))
    assert status["error_share"] == 1.0
    assert "errors      100 % of " in ask("runs", "status", "--run", run_id)
    scored, failed, share = served(command_server, run, "score_trajectories", "score_episode_errors", "error_share")
    assert (scored == failed > 0, share) == (True, 1.0)
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["error_share"] == 1.0
    assert "(episodes " in (run.folder / "report.html").read_text()
    compared = ask("runs", "compare", run_id, run_id)
    assert re.search(r"^share of trajectories with an error +1(\.0+)? ", compared, re.M)
