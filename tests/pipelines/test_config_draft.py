"""A configuration with wrong settings: the rest keeps its values, and no problem follows from a default."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from pipelines.config import ConfigDraft, draft_config, read_config
from pipelines.config_draft import names_any
from pipelines.config_paths import beside
from pipelines.run import start_checks
from pipelines.run.start_checks import known_problems, named

EXAMPLES = Path(__file__).parents[2] / "examples"
TWICE = {("prompts", "environment"), ("warm_start", "model", "task")}
"""Strings of which two things are wrong: there is no such environment or task, and the agents or prompts need one."""


def draft(table: dict[str, Any], *changes: str) -> ConfigDraft:
    return draft_config(deepcopy(table), "f", changes)


def test_draft_keeps_the_values_beside_wrong_ones() -> None:
    table = {
        "rollout": {"slots": "a", "replicas": 3},
        "experience": {"global_batch": 0, "max_staleness": 7},
        "trainer": {"optimizer_step": 5, "learner": {"learning_rate": -1.0, "betas": [0.8, 0.9]}},
        "score": {"rewards": [{"name": "exact", "weight": "much"}, {"name": "numeric"}]},
    }
    found = draft(table, "kafka.partitions=0", "nonsense")
    assert len(found.problems) == 7
    config = found.config
    assert (config.rollout.replicas, config.experience.max_staleness) == (3, 7)
    assert config.trainer.learner.betas == (0.8, 0.9)
    assert [(each.name, each.weight) for each in config.score.rewards] == [("exact", 1.0), ("numeric", 1.0)]
    assert found.replaced == {
        "rollout.slots",
        "experience.global_batch",
        "trainer.optimizer_steps",
        "trainer.learner.learning_rate",
        "score.rewards.weight",
        "kafka.partitions",
        "nonsense",
    }


def test_draft_names_all_values_that_a_section_refuses() -> None:
    prompts = {"task": "gcd", "samples_per_prompt": 0, "temperature": -1.0, "template": "no slot", "stop": [""]}
    problems = [problem.removeprefix("f: prompts: ") for problem in draft({"prompts": prompts}).problems]
    assert [each.split(" must ")[0] for each in problems] == ["samples_per_prompt", "temperature", "template", "stop"]


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"prompts": {"source": "jsonl", "paht": "a.jsonl"}}, "unknown key prompts.paht; did you mean 'path'?"),
        ({"prompts": {"source": "jsonll", "path": "a.jsonl"}}, "(it is 'jsonll'); did you mean 'jsonl'?"),
        ({"score": {"rewards": [{"name": 5}]}}, "score.rewards.0.name: Input should be a valid string"),
        ({"score": {"shards": 4}, "kafka": {"partitions": "8"}}, "kafka.partitions: Input should be a valid integer"),
        ({"prompts": {"max_new_tokens": 0, "tasks": [{"task": "gcd"}, {"task": "lcm"}]}}, "max_new_tokens must be at"),
    ],
)
def test_draft_names_no_problem_of_a_default(table: dict[str, Any], problem: str) -> None:
    (found,) = draft(table).problems
    assert problem in found


def test_unknown_key_is_one_problem_if_the_meant_one_is_set() -> None:
    found = draft({"prompts": {"task": "gcd", "max_token": 5}}, "prompts.max_new_tokens=64")
    assert [each for each in found.problems if "max_token" in each] == [*found.problems]
    assert len(found.problems) == 1
    assert found.replaced == frozenset()


def test_wrong_setting_hides_none_of_its_name_in_another_section() -> None:
    model = {"task": "gcd"}
    table = {"prompts": {"task": "gcd", "max_token": 5}, "warm_start": {"max_new_tokens": 0, "model": model}}
    assert [each.partition(" ")[2][:30] for each in draft(table).problems] == [
        "unknown key prompts.max_token;",
        "warm_start: max_new_tokens mus",
    ]


def test_pattern_of_another_type_is_refused() -> None:
    reward = {"name": "regex", "options": {"pattern": 5}}
    (problem,) = draft({"score": {"rewards": [reward]}}).problems
    assert "regex needs a text as 'pattern', not 5" in problem


def test_draft_of_a_hopeless_table_has_no_other_problems() -> None:
    found = draft({"prompts": 5, "kafka": 5})
    assert len(found.problems) == 2
    assert found.problems_and(["prompts.path: gone", "kafka: no", "model.path: gone"])[2:] == ("model.path: gone",)


@pytest.mark.parametrize(
    ("problem", "is_named"),
    [
        ("experience.global_batch = 16 is no multiple of samples_per_prompt = 6", True),
        ("prompts, task 'rows': samples_per_prompt is 3", True),
        ("prompts.tasks.samples_per_prompt is 3", True),
        ("prompts: heldout = 50 leaves none", True),
        ("rollout.environments: heldout is no option", False),
        ("prompts.heldout_path: a.jsonl does not exist", False),
        ("score.rewards: mine.py:raises fails\n  samples_per_prompt = 5", False),
    ],
)
def test_problem_is_about_the_settings_that_it_names(problem: str, is_named: bool) -> None:
    assert names_any(problem, ["prompts.tasks.samples_per_prompt", "prompts.heldout"]) == is_named


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda file: file.stem)
def test_one_wrong_setting_is_one_problem(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each setting of the example: a wrong type, a value that is no valid one, another name."""
    monkeypatch.setattr(start_checks, "visible_gpus", lambda: tuple("01234567"))
    table = beside(file.parent, tomllib.loads(file.read_text()))
    sound = known_problems(named(read_config(file), file))
    for place in _settings(table):
        for wrong in ({"x": 1}, "nonsense", -7, None):
            changed = deepcopy(table)
            section: Any = changed
            for part in place[:-1]:
                section = section[part]
            if wrong is None:
                section[f"{place[-1]}_"] = section.pop(place[-1])
            else:
                section[place[-1]] = wrong
            problems = known_problems(named(draft(changed), file))
            new = [problem for problem in problems if problem not in sound]
            assert len(new) <= 1 + (place in TWICE), (place, wrong, new)
            assert new or wrong in ("nonsense", -7), (place, wrong)


def _settings(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The settings of a table that have a name and a value of their own."""
    rows = isinstance(value, list) and any(isinstance(item, dict) for item in value)
    if not isinstance(value, dict) and not rows:
        yield place
        return
    for part, item in value.items() if isinstance(value, dict) else enumerate(value):
        if part not in ("task_args", "options", "levels", "gpu_memory_utilization"):
            yield from _settings(item, (*place, part))
