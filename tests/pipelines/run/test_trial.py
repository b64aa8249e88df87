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
from operators.score.config import TaskRubric
from pipelines.config import Config, parse_config
from pipelines.run.trial import all_problems, run_trial, try_config
from pipelines.run.trial_result import CHECK_FILE, TrialResult, read_check, read_trial

pytestmark = pytest.mark.usefixtures("renders_all_rows")
MINE = """
import time
def right(text, answer, reference, tokens): return float(answer == reference["answer"])
def raises(text): return {}["answr"]
def text(text): return "1.0"
def nan(text): return float("nan")
def number(text): return float(float(text) > 0) / 2
def plays(client, task, temperature=1.0): return 1.0
class Near:
    def __init__(self, within): self.within, self.calls = within, 0
    def __call__(self, answer): self.calls += 1; return float(abs(float(answer) - 1) <= self.within)
class Silent:
    pass
def hangs(text): time.sleep(60)
def sums(text, prompt): return float("3" not in prompt or int("many"))
def itself(text, answer): return float(answer in text)

class Works:
    def reset(self, prompt): return f"{prompt['reference']['answer']}?"
    def step(self, text): return "", 1.0, True, {}

class Raises(Works):
    def reset(self, prompt): return prompt["refrence"]

class Hangs(Works):
    def reset(self, prompt): time.sleep(60)

class Number(Works):
    def reset(self, prompt): return 7

class Three(Works):
    def step(self, text): return "", 1.0, True

class Sleeps(Works):
    def step(self, text): time.sleep(60)

class Text(Works):
    def step(self, text): return "", "1", True, {}

class Odd(Works):
    def reset(self, prompt): return "?" if int(prompt["reference"]["answer"]) % 2 else prompt["refrence"]
"""
LIMITS_S = {"hangs": 1.0, "Hangs": 1.0, "Sleeps": 5.0}
"""Of code of the user that does not end. Other code may take a minute: the machine may do other work."""
IMPORT_HANGS = "import time\ntime.sleep(60)\ndef mine(text): return 1.0\n"


def rows(folder: Path, count: int = 10, extra: tuple[str, ...] = ()) -> str:
    good = [json.dumps({"question": f"What is {n} + 1?", "answer": str(n + 1)}) for n in range(count)]
    (folder / "rows.jsonl").write_text("\n".join([*good, *extra]) + "\n")
    (folder / "mine.py").write_text(MINE)
    (folder / "slow.py").write_text(IMPORT_HANGS)
    return str(folder / "rows.jsonl")


def config_of(folder: Path, reward: str = "right", environment: str = "", **prompts: Any) -> Config:
    table: dict[str, Any] = {
        "run": {"name": "trial", "folder": str(folder), "check_timeout_s": 60.0},
        "prompts": {"source": "jsonl", "path": str(folder / "rows.jsonl"), **prompts},
        "score": {"time_limit_s": LIMITS_S.get(reward, 60.0), "rewards": [{"name": f"{folder}/mine.py:{reward}"}]},
        "warm_start": {},
        "trainer": {"learner": {"learning_rate": 2e-4}},
    }
    if environment:
        table["prompts"]["environment"] = environment
        limit_s = LIMITS_S.get(environment, 60.0)
        table["rollout"] = {"environments": [{"name": f"{folder}/mine.py:{environment}", "seconds": limit_s}]}
    return parse_config(table, "test")


def trial(config: Config, folder: Path) -> TrialResult:
    run_trial(config, folder / "preflight.json")
    return read_trial(folder / "preflight.json")


def test_trial_of_a_sound_run_has_no_problems(tmp_path: Path) -> None:
    rows(tmp_path)
    found = trial(config_of(tmp_path, "right", "Works", shuffle=False), tmp_path)
    first = {"task": "rows", "environment": "Works", "prompt": "What is 0 + 1?", "response": "# 1", "reward": 1.0}
    assert found == TrialResult(tried=[first])


def test_trial_warns_of_a_reward_that_compares_with_itself(tmp_path: Path) -> None:
    rows(tmp_path)
    (warning,) = trial(config_of(tmp_path, "itself", shuffle=False), tmp_path).warnings
    assert "the response '# 2', the answer of another question, has the same reward (1) as '# 1'" in warning
    assert 'that of the data is reference["answer"]' in warning


def test_trial_names_each_check_before_it_begins(tmp_path: Path) -> None:
    rows(tmp_path)
    config = config_of(tmp_path, "right", "Works")
    begun: list[str] = []
    all_problems(config, started=begun.append)
    assert begun == [
        "the prompts' data",
        "the tokenizer",
        "the prompts of task 'rows'",
        f"reward {tmp_path}/mine.py:right on the first prompts of task 'rows'",
        "environment Works",
        "the buffer's sampler, writers and evictions",
    ]
    trial(config, tmp_path)
    check = read_check(tmp_path / CHECK_FILE)
    assert check is not None
    assert check.subject == begun[-1]
    assert read_check(tmp_path / "none.json") is None


def test_trial_reports_all_problems_at_once(tmp_path: Path) -> None:
    rows(tmp_path, 8, ('{"question": "And?"}', "no json", '{"answer": "4"}'))
    found = trial(config_of(tmp_path, "raises", "Raises", heldout=50), tmp_path)
    heldout, refused, reward, environment = found.problems
    assert heldout.startswith("prompts: heldout = 50 leaves none of the 8 distinct questions")
    assert "27.3 % of 11 rows (no answer 1, malformed 1, no question 1) are refused" in refused
    assert "no answer: row 9: no value in column " in refused
    assert "accept them with prompts.max_refused_share = 0.28" in refused
    where = "on each of the first 8 prompts"
    assert reward.startswith(f"score.rewards: {tmp_path}/mine.py:raises fails {where} of task 'rows' with the response")
    assert "KeyError: 'answr' (mine.py:4)\n" in reward
    assert f'File "{tmp_path}/mine.py", line 4, in raises' in reward
    assert environment.startswith(
        f"rollout.environments: Raises fails at its reset {where}: KeyError: 'refrence' (mine"
    )


def test_trial_accepts_a_reward_class_with_options(tmp_path: Path) -> None:
    rows(tmp_path)
    config = config_of(tmp_path, "Near")
    (spec,) = config.score.rewards
    with_options = replace(spec, options={"within": 0.5})
    config = replace(config, score=replace(config.score, rewards=(with_options,)))
    found = trial(config, tmp_path)
    assert (found.problems, found.warnings) == ([], [])


@pytest.mark.parametrize("heldout", [{"heldout": 4}, {"heldout_path": "rows.jsonl"}])
def test_trial_names_a_misspelt_column_once(heldout: dict[str, Any], tmp_path: Path) -> None:
    rows(tmp_path)
    if "heldout_path" in heldout:
        heldout = {"heldout_path": str(tmp_path / "rows.jsonl")}
    (problem,) = trial(config_of(tmp_path, prompt_column="instrution", **heldout), tmp_path).problems
    expected = "no value in column instrution (the row has answer, question); prompts.prompt_column names it"
    assert expected in problem


@pytest.mark.parametrize(("kind", "name"), [("reward", "right"), ("environment", "Works")])
def test_trial_suggests_the_nearest_name(kind: str, name: str, tmp_path: Path) -> None:
    rows(tmp_path)
    (problem,) = trial(config_of(tmp_path, **{kind: f"{name}s"}), tmp_path).problems
    what = "function" if kind == "reward" else "class"
    assert f"mine.py has no {what} '{name}s'; did you mean '{name}'?" in problem
    assert "within" not in problem


def test_trial_warns_of_code_that_fails_on_some_prompts(tmp_path: Path) -> None:
    rows(tmp_path)
    found = trial(config_of(tmp_path, "sums", "Odd", shuffle=False), tmp_path)
    assert found.problems == []
    reward, environment = found.warnings
    assert "mine.py:sums fails on 1 of the first 8 prompts of task 'rows' with the response '# 4': ValueError" in reward
    assert "Such trajectories are not trained (score.on_error is not set)\n" in reward
    assert ", in sums" in reward
    assert "Odd fails at its reset on 4 of the first 8 prompts: KeyError: 'refrence' (mine.py:" in environment


def test_all_problems_adds_those_of_a_trial_to_known_ones(tmp_path: Path) -> None:
    rows(tmp_path)
    gone = str(tmp_path / "gone.jsonl")
    config = config_of(tmp_path, "missing", prompt_column="instrution", heldout_path=gone)
    known = f"prompts.heldout_path: {gone} does not exist"
    first, column, reward = all_problems(config, [known]).problems
    assert first == known
    assert "no value in column instrution (the row has answer, question)" in column
    assert "has no function 'missing'" in reward


def test_trial_names_a_reward_of_two_tasks_once(tmp_path: Path) -> None:
    rows(tmp_path)
    config = config_of(tmp_path, "raises", tasks=[{"name": "one"}, {"name": "two"}])
    (problem,) = trial(config, tmp_path).problems
    assert "mine.py:raises fails on each of the first 8 prompts of task 'one'" in problem


def test_trial_without_prompts_names_each_check_once(tmp_path: Path) -> None:
    rows(tmp_path)
    config = config_of(tmp_path, path=str(tmp_path / "gone.jsonl"), tasks=[{"name": "one"}, {"name": "two"}])
    rubrics = tuple(TaskRubric(rewards=config.score.rewards, name=name) for name in ("one", "two"))
    begun: list[str] = []
    all_problems(replace(config, score=replace(config.score, tasks=rubrics)), (), begun.append)
    assert len(begun) == len(set(begun))
    assert [each for each in begun if "the import of" in each] == [f"the import of reward {tmp_path}/mine.py:right"]


def test_trial_names_each_reward_that_cannot_be_loaded(tmp_path: Path) -> None:
    rows(tmp_path)
    config = config_of(tmp_path)
    names = ("gone", "right", "raises", "lost")
    rewards = tuple(replace(config.score.rewards[0], name=f"{tmp_path}/mine.py:{name}") for name in names)
    gone, lost, raises = trial(replace(config, score=replace(config.score, rewards=rewards)), tmp_path).problems
    assert "has no function 'gone'" in gone
    assert "has no function 'lost'" in lost
    assert "mine.py:raises fails on each of the first 8 prompts" in raises


@pytest.mark.parametrize(
    ("answer", "problem", "hint"),
    [
        ("marker", True, ". It works with the answer alone: take the parameter answer, which has"),
        ("whole", False, ". It works with the answer alone: set score.answer (now 'whole'), and take the parameter an"),
    ],
)
def test_trial_tries_whole_responses(answer: str, problem: bool, hint: str, tmp_path: Path) -> None:
    rows(tmp_path)
    config = config_of(tmp_path, "number")
    found = trial(replace(config, score=replace(config.score, answer=answer)), tmp_path)
    assert (len(found.problems), len(found.warnings)) == (problem, not problem)
    (text,) = found.problems + found.warnings
    assert ("on the response 'The answer is 1' of task 'rows': " in text) is not problem
    assert ": ValueError: could not convert string to float: " in text
    assert hint in text.splitlines()[0]


@pytest.mark.parametrize(
    ("reward", "environment", "expected"),
    [
        ("text", "", "TypeError: returned str instead of a number"),
        ("nan", "", "ValueError: returned nan"),
        ("hangs", "", "the verifier took longer than 1 s"),
        ("missing", "", "has no function 'missing'"),
        ("Silent", "", "Silent is a class without __call__(self, text, ...), which returns the reward"),
        ("Near", "", "missing 1 required positional argument: 'within'"),
        ("right", "Number", "TypeError: an observation must be text, not int (mine.py:29)"),
        ("right", "Hangs", "Hangs fails at its reset on the first prompt: a step of the environment took longer than"),
        ("right", "Three", "TypeError: step must return 4 values (observation, reward, done, info), not 3 values"),
        ("right", "Sleeps", "Sleeps fails at its step on the first prompt with the response '# "),
        ("right", "Text", "TypeError: a reward must be a number, not str (mine.py:"),
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
    (problem,) = try_config(config, roles=("prompts", "score")).problems  # all have this limit
    late = "the verifier took longer than 1 s. It may be slow, or the machine busy: raise run.check_timeout_s"
    assert late in problem
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
    assert "20.0 % of 10 rows (too long 2) are refused (too long: prompt " in warning


def test_trial_checks_held_out_questions(tmp_path: Path) -> None:
    rows(tmp_path)
    held, texts = tmp_path / "held.jsonl", ["x" * 600, "Short?"]
    held.write_text("".join(f"{json.dumps({'question': text, 'answer': '1'})}\n" for text in texts))
    found = trial(config_of(tmp_path, heldout_path=str(held)), tmp_path)
    assert found.problems == []
    (warning,) = found.warnings
    assert "1 of 2 held-out questions are too long and are not asked (prompt 0 has " in warning
    held.write_text(json.dumps({"question": "x" * 600, "answer": "1"}))
    (problem,) = trial(config_of(tmp_path, heldout_path=str(held)), tmp_path).problems
    assert "1 of 1 held-out questions are too long" in problem
    turns = [{"role": role, "content": "Sum?"} for role in ("user", "assistant", "user")]
    held.write_text(json.dumps({"question": turns, "answer": "1"}))
    (problem,) = trial(config_of(tmp_path, heldout_path=str(held)), tmp_path).problems
    assert "a held-out question cannot be rendered: " in problem


def test_trial_checks_all_levels_of_a_curriculum(tmp_path: Path) -> None:
    rows(tmp_path, 8, [json.dumps({"question": "x" * 600, "answer": "99"})])
    levels = ("answer = '1'", "answer = '99'")
    (problem,) = trial(config_of(tmp_path, levels=levels), tmp_path).problems
    assert problem.startswith("prompts, task 'rows, level 1': 100.0 % of 1 rows (too long 1) are refused")


def test_questions_may_be_few_for_a_resumed_run(tmp_path: Path) -> None:
    rows(tmp_path)
    config = config_of(tmp_path, epochs=1)
    assert "prompts.epochs: 10 questions" in trial(config, tmp_path).problems[0]
    config.run_folder.mkdir()
    (config.run_folder / "config.toml").write_text("")
    found = trial(config, tmp_path)  # `laminar import` may have filled it
    assert [not found.problems, "prompts.epochs: 10 questions" in str(found.warnings)] == [True, True]


def test_trial_answers_0_if_the_reference_does(tmp_path: Path) -> None:
    rows(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"question": "What is 1 - 1?", "answer": 0}\n' * 2)
    assert [each["response"] for each in trial(config_of(tmp_path), tmp_path).tried] == ["# 0"]


def test_trial_warns_of_responses_that_the_context_shortens(tmp_path: Path) -> None:
    rows(tmp_path)
    (warning,) = trial(config_of(tmp_path, max_new_tokens=505, heldout=2), tmp_path).warnings
    assert "8 of 8 training prompts (of 10 rows) leave less than max_new_tokens = 505 in a context" in (warning)


def test_trial_refuses_responses_longer_than_the_context(tmp_path: Path) -> None:
    rows(tmp_path)
    (problem,) = trial(config_of(tmp_path, max_new_tokens=513), tmp_path).problems
    assert "max_new_tokens = 513 is more than the whole context of 512 tokens" in problem


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
    begun: list[str] = []
    try_config(config, begun.append)
    assert begun[1:3] == ["the tokenizer, whose libraries are being loaded", "the tokenizer"]


def test_trial_warns_of_doubtful_settings(tmp_path: Path) -> None:
    rows(tmp_path)
    config = config_of(tmp_path, samples_per_prompt=6)
    learner = config.trainer.learner
    learner = replace(learner, algorithm=replace(learner.algorithm, clip_high=0.3))
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
    (tmp_path / "parses.py").write_text("import sys\nsys.exit(2)\n")
    parses = replace(sampler, name=f"{tmp_path}/parses.py:Mine")
    config = replace(config, experience=replace(config.experience, sampler=parses))
    (problem,) = trial(config, tmp_path).problems
    assert problem == "experience: SystemExit: 2"


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("mine.py:plays", None),
        ("mine.py:gone", "has no function 'gone'"),
        ("mine.py:nan", "nan is called as nan(client, task), but its definition is nan(text): too many positional"),
        ("slow.py:mine", "the import takes over 1 s"),
    ],
)
def test_trial_loads_the_function_of_agents(tmp_path: Path, function: str, expected: str | None) -> None:
    rows(tmp_path)
    table = {"prompts": {"task": "gcd", "environment": "agent"}, "agents": {"function": f"{tmp_path}/{function}"}}
    run = {"name": "trial", "check_timeout_s": 1.0 if "slow" in function else 60.0}
    config = parse_config({"run": run, **table, "warm_start": {}}, "test")
    found = [problem for problem in all_problems(config).problems if problem.startswith("agents.function: ")]
    assert len(found) == (expected is not None)
    assert all(str(expected) in problem for problem in found)
