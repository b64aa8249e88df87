"""The examples of docs/hooks.md work as they stand: each file is written, configured as shown, and used once."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from operators.agents.function_server import load_function
from operators.autoscaler.observation import Observation
from operators.autoscaler.policies import make_policy
from operators.experience.evictions import Drop
from operators.rollout.environments.config import EnvironmentSpec
from operators.rollout.environments.contract import LiveEpisode, load_environment
from operators.score.attempt import Attempt
from operators.score.rewards import make_judge
from pipelines.config import Config, parse_config
from pipelines.run.paths import files_read, with_absolute_paths

TEXT = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text("utf-8")
SECTIONS = [tomllib.loads(each) for each in re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)]
FILES = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The document's configuration, read in the folder with its files."""
    for name, source in FILES:
        (tmp_path / name).write_text(source)
    monkeypatch.chdir(tmp_path)
    table = {name: section for each in SECTIONS for name, section in each.items()}
    tasks = [{"name": "played"}, {"name": "agents", "environment": "agent"}]
    prompts = {"task": "gcd", **table["prompts"], "tasks": tasks}
    return with_absolute_paths(parse_config({**table, "prompts": prompts}, "hooks.md"))


def test_hooks_document_has_files_for_all_hooks(config: Config, tmp_path: Path) -> None:
    read = {path for _, path in files_read(config) if path.is_relative_to(tmp_path)}
    assert read == {tmp_path / name for name, _ in FILES}
    assert len(FILES) == 5


def test_reward_of_the_document_is_called(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")  # paths are absolute
    (spec,) = config.score.rewards
    judge = make_judge(spec.name, spec.options)
    values = [judge(Attempt("", answer, 1, "", "gcd", {"answer": "4"})) for answer in ("4.4", "5", "four", None)]
    assert values == [1.0, 0.0, 0.0, 0.0]


def test_environment_of_the_document_needs_no_section(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert config.prompts.environment == "Countdown"
    (spec,) = config.rollout.environments
    episode = LiveEpisode(load_environment(spec.target, spec.options), {"text": "?"}, spec.max_observation_chars)
    for _ in range(3):
        episode.step("turn\n")
    assert episode.state.rewards == [0.0, 0.0, 1.0]
    assert episode.state.done


def test_agent_of_the_document_is_called(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert config.agents is not None
    asked: dict[str, Any] = {}

    def create(**request: Any) -> Any:
        asked.update(request)
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content="It is 4."))])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    task = {"text": "2 + 2?", "reference": {"answer": 4}}
    assert load_function(config.agents.function)(client, task) == {"answer": "It is 4.", "reward": 1.0}
    assert asked["messages"] == [{"role": "user", "content": "2 + 2?"}]


def test_buffer_classes_of_the_document_are_made(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    made = (config.experience.make_sampler(), *config.experience.make_writers(), *config.experience.make_evictions())
    assert [type(each).__name__ for each in made] == ["ShortestFirst", "Short", "Easy"]
    sampler, writer, eviction = made
    groups = [SimpleNamespace(tokens=tokens, rewards=[0.5, 1.0], members=["m"]) for tokens in (900, 5000, 40)]
    assert [group.tokens for group in sampler.order(groups, None)] == [40, 900]
    assert [writer.refuse(SimpleNamespace(tokens=tokens)) for tokens in (512, 513)] == [None, "513 tokens"]
    assert eviction.evict(groups, None) == []
    assert eviction.evict([SimpleNamespace(rewards=[1.0], members=["m"])], None) == [Drop("m", "easy")]


def test_policy_of_the_document_decides(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert config.autoscaling is not None
    policy = make_policy(config.autoscaling)
    requests = [policy.request(Observation(0.0, 1, time_of_day=hour * 3600)) for hour in (3, 12)]
    assert [(each.kind, each.processes) for each in requests if each] == [("exactly", 4), ("exactly", 1)]


def test_named_environments_are_added_once_for_all_tasks() -> None:
    tasks = [
        {"task": "gcd", "environment": "my:First"},
        {"task": "lcm", "environment": "my:First"},
        {"task": "chain_sum", "environment": "other.py:Second"},
        {"task": "countdown", "environment": ""},
        {"task": "leg_counting", "environment": "guess"},
    ]
    known = [{"name": "other.py:Second", "label": "mine", "turns": 3}]
    config = parse_config({"prompts": {"tasks": tasks}, "rollout": {"environments": known}}, "test")
    assert config.rollout.environments == (
        EnvironmentSpec("other.py:Second", label="mine", turns=3),
        EnvironmentSpec("my:First"),
        EnvironmentSpec("guess"),
    )
    assert [task.environment for task in config.prompts.mixture] == ["First", "First", "mine", "", "guess"]
