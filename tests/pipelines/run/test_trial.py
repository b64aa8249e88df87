"""The trial of a run: its prompts, rewards and environments are used once, and all problems are reported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.models.checkpoint_folder import save_folder
from infra.models.demo import build_demo_model
from infra.models.demo_config import DemoModelConfig
from pipelines.config import Config, parse_config
from pipelines.run.trial import run_trial
from pipelines.run.trial_result import TrialResult, read_trial

MINE = """
import time
def right(text, answer, reference, tokens): return float(answer == reference["answer"])
def raises(text): return {}["answr"]
def text(text): return "1.0"
def nan(text): return float("nan")
def hangs(text): time.sleep(60)

class Works:
    def reset(self, prompt): return f"{prompt['reference']['answer']}?"
    def step(self, text): return "", 1.0, True, {}

class Raises(Works):
    def reset(self, prompt): return prompt["refrence"]

class Hangs(Works):
    def reset(self, prompt): time.sleep(60)

class Number(Works):
    def reset(self, prompt): return 7
"""
IMPORT_HANGS = "import time\ntime.sleep(60)\ndef mine(text): return 1.0\n"


def rows(folder: Path, count: int = 10, extra: tuple[str, ...] = ()) -> str:
    good = [json.dumps({"question": f"What is {n} + 1?", "answer": str(n + 1)}) for n in range(count)]
    (folder / "rows.jsonl").write_text("\n".join([*good, *extra]) + "\n")
    (folder / "mine.py").write_text(MINE)
    (folder / "slow.py").write_text(IMPORT_HANGS)
    return str(folder / "rows.jsonl")


def config_of(folder: Path, reward: str = "right", environment: str = "", **prompts: Any) -> Config:
    table: dict[str, Any] = {
        "run": {"name": "trial", "folder": str(folder), "check_timeout_s": 20.0},
        "prompts": {"source": "jsonl", "path": str(folder / "rows.jsonl"), **prompts},
        "score": {"time_limit_s": 1.0, "rewards": [{"name": f"{folder}/mine.py:{reward}"}]},
        "warm_start": {},
    }
    if environment:
        table["prompts"]["environment"] = environment
        table["rollout"] = {"environments": [{"name": f"{folder}/mine.py:{environment}", "seconds": 1.0}]}
    return parse_config(table, "test")


def trial(config: Config, folder: Path) -> TrialResult:
    run_trial(config, folder / "preflight.json")
    return read_trial(folder / "preflight.json")


def test_trial_of_a_sound_run_has_no_problems(tmp_path: Path) -> None:
    rows(tmp_path)
    assert trial(config_of(tmp_path, "right", "Works", heldout=2), tmp_path) == TrialResult()


def test_trial_reports_all_problems_at_once(tmp_path: Path) -> None:
    rows(tmp_path, 8, ('{"question": "And?"}', "no json", '{"answer": "4"}'))
    found = trial(config_of(tmp_path, "raises", "Raises", heldout=50), tmp_path)
    heldout, refused, reward, environment = found.problems
    assert heldout.startswith("prompts: heldout = 50 leaves none of the 8 distinct questions")
    assert "27.3 % of 11 rows (no answer 1, malformed 1, no question 1) are refused" in refused
    assert "no answer: row 9: no value in column " in refused
    assert "accept them with prompts.max_refused_share = 0.28" in refused
    assert reward.startswith(f"score.rewards: {tmp_path}/mine.py:raises fails on the first prompt of task 'rows'")
    assert "KeyError: 'answr' (mine.py:4)\n" in reward
    assert f'File "{tmp_path}/mine.py", line 4, in raises' in reward
    assert environment.startswith("rollout.environments: Raises fails at its reset on the first prompt: ")
    assert "KeyError: 'refrence'" in environment


@pytest.mark.parametrize(
    ("reward", "environment", "expected"),
    [
        ("text", "", "TypeError: returned str instead of a number"),
        ("nan", "", "ValueError: returned nan"),
        ("hangs", "", "the verifier took longer than 1 s"),
        ("missing", "", "has no function 'missing'"),
        ("right", "Number", "TypeError: an observation must be text, not int"),
        ("right", "Hangs", "a step of the environment took longer than 1 s"),
        ("right", "Missing", "has no class 'Missing'"),
    ],
)
def test_trial_names_the_failing_code(reward: str, environment: str, expected: str, tmp_path: Path) -> None:
    rows(tmp_path)
    (problem,) = trial(config_of(tmp_path, reward, environment), tmp_path).problems
    assert expected in problem
    assert problem.startswith("rollout.environments: " if environment else "score.rewards: ")


def test_trial_limits_the_import_of_user_code(tmp_path: Path) -> None:
    rows(tmp_path)
    config = config_of(tmp_path)
    slow = replace(config.score, rewards=(replace(config.score.rewards[0], name=f"{tmp_path}/slow.py:mine"),))
    config = replace(config, score=slow, run=replace(config.run, check_timeout_s=1.0))
    (problem,) = trial(config, tmp_path).problems
    assert "the verifier took longer than 1 s" in problem
    unchecked = replace(config, run=replace(config.run, check_timeout_s=0.0))
    assert trial(unchecked, tmp_path).problems == []


def test_trial_counts_prompts_that_are_too_long(tmp_path: Path) -> None:
    long = json.dumps({"question": "x" * 600, "answer": "1"})
    rows(tmp_path, 8, (long, long))
    (problem,) = trial(config_of(tmp_path), tmp_path).problems
    assert "20.0 % of 10 rows (too long 2) are refused (too long: prompt " in problem
    accepted = trial(config_of(tmp_path, max_refused_share=0.2), tmp_path)
    assert accepted.problems == []
    (warning,) = accepted.warnings
    assert "20.0 % of 10 rows (too long 2) are refused" in warning


def test_trial_warns_of_responses_that_the_context_shortens(tmp_path: Path) -> None:
    rows(tmp_path)
    (warning,) = trial(config_of(tmp_path, max_new_tokens=505), tmp_path).warnings
    assert "10 of 10 prompts leave less than max_new_tokens = 505 in a context of 512" in warning


def test_trial_names_the_tokenizer_of_another_model(tmp_path: Path) -> None:
    rows(tmp_path)
    model, tokenizer = build_demo_model(DemoModelConfig(layers=1))
    save_folder(model, tokenizer, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": 100}))
    config = config_of(tmp_path)
    config = replace(config, model=replace(config.model, path=str(tmp_path / "model")), warm_start=None)
    (problem,) = trial(config, tmp_path).problems
    assert "but the model's vocabulary has 100 tokens" in problem


def test_trial_warns_of_doubtful_settings(tmp_path: Path) -> None:
    rows(tmp_path)
    config = config_of(tmp_path, samples_per_prompt=6)
    learner = replace(
        config.trainer.learner,
        algorithm=replace(config.trainer.learner.algorithm, clip_high=0.3),
    )
    config = replace(config, trainer=replace(config.trainer, learner=learner))
    batch, clip = trial(config, tmp_path).warnings
    assert batch.startswith("experience.global_batch = 128 is no multiple of samples_per_prompt = 6, task 'rows'")
    assert "a clip without effect (clip_high)" in clip


def test_trial_loads_the_classes_of_the_buffer(tmp_path: Path) -> None:
    rows(tmp_path)
    config = config_of(tmp_path)
    sampler = replace(config.experience.sampler, name=f"{tmp_path}/mine.py:Works")
    config = replace(config, experience=replace(config.experience, sampler=sampler))
    (problem,) = trial(config, tmp_path).problems
    assert problem.startswith("experience: sampler: ")
    assert "must be a class that derives from operators.experience.samplers.Sampler" in problem
