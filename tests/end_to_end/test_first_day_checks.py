"""A new user's mistakes: `laminar run` names them all before it starts anything, with the time-outs of user code."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from first_day import QUESTIONS, Answer, Shell, write_folder
from hooks_document import with_functions, with_programs, write_files
from laminar_runs import CommandServer, kill_processes_in

from infra.models.checkpoint_folder import save_folder
from infra.models.demo import build_demo_model
from infra.models.demo_config import DemoModelConfig

MINE = """
import time


def raises(text): return {}["answr"]
def string(text): return "1.0"
def nan(text): return float("nan")


class Slow:
    def reset(self, prompt): time.sleep(60)
    def step(self, text): return "", 1.0, True, {}
"""
SLOW = "import time\n\ntime.sleep(60)\n\n\ndef mine(text): return 1.0\n"
LEARNER = {"learning_rate": 1e-3}


@pytest.fixture
def shell(command_server: CommandServer, model_folder: Path, tmp_path: Path) -> Iterator[Shell]:
    here = tmp_path / "work"
    write_folder(here, model_folder)
    (here / "mine.py").write_text(MINE)
    (here / "slow.py").write_text(SLOW)
    (tmp_path / "outputs").mkdir()
    yield Shell(command_server, here, tmp_path / "outputs")
    kill_processes_in([here])


def run(shell: Shell, *words: str, prompts: dict[str, Any] | None = None, **sections: Any) -> Answer:
    """`laminar run WORDS` of the user's configuration with changes. It must not start, and leave nothing."""
    table: dict[str, Any] = {
        "model": {"path": "model"},
        "prompts": {"source": "jsonl", "path": "rows.jsonl", "extra_columns": ["unit"], **(prompts or {})},
        "score": {"rewards": [{"name": "my_reward.py:variety"}]},
        "trainer": {"learner": LEARNER},
        **sections,
    }
    (shell.here / "mistaken.toml").write_text(tomli_w.dumps(table))
    answer = shell("run", "mistaken.toml", *words)
    assert not [path for path in (shell.here / "runs").glob("*") if path.name != "latest"]
    return answer


def problems(answer: Answer) -> list[str]:
    """The problems that a start has named, each when it was found."""
    assert answer.code == 1
    *named, last = answer.text.splitlines()
    found = [line for line in named if line.startswith("problem: ")]
    assert last == f"laminar: the run cannot start: the {len(found)} problems above"
    return named


def test_start_names_everything_that_is_wrong(shell: Shell) -> None:
    model, long = shell.here / "model", {**QUESTIONS[0], "question": "x" * 600}
    rows = [long, {"answer": "2"}, *QUESTIONS[:18]]
    (shell.here / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows) + "no json\n")
    (shell.here / "exits.py").write_text("import sys\n\nsys.exit(2)\n")
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "vocab_size": 12}))
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(1 << 42)  # a sparse file: 4 TiB of weights
    with socket.create_server(("127.0.0.1", 0)) as used:
        used_port = used.getsockname()[1]
        found = problems(
            run(
                shell,
                prompts={"environment": "ecko", "heldout": 50, "samples_per_prompt": 1, "max_new_tokens": 600},
                relay={"port": used_port},
                gateway={"port": used_port},
                score={"rewards": [{"name": f"mine.py:{name}"} for name in ("raises", "gone", "lost")]},
                trainer={"learner": {"learning_rate": 0.0}},
                rollout={"kv_capacity": 5},
                run={"trackers": ["wandb"]},
                experience={"sampler": {"name": "exits.py:Mine"}},
            )
        )
    for expected in (
        "prompts.environment: there is no environment 'ecko' in rollout.environments",
        "run.folder: ",  # free disk
        "relay.store: ",  # shared memory
        f"relay.port: 127.0.0.1:{used_port} cannot be used: Address already in use",
        f"gateway.port: 127.0.0.1:{used_port} cannot be used: Address already in use",
        f"gateway.port and relay.port are both {used_port}: the roles of one machine need two ports",
        "run.trackers: wandb is not installed: ",
        "experience: SystemExit: 2",
        "trainer.learner.learning_rate = 0: the model would not change",
        "prompts.samples_per_prompt = 1, task 'rows': the advantage of tis",
        "prompts: heldout = 50 leaves none of the ",
        "but the model's vocabulary has 12 tokens",
        "rollout.kv_capacity = 5 tokens cannot hold one context of 512",
        "% of 21 rows (",
        "too long: prompt ",
        "max_new_tokens = 600 is more than the whole context of 512 tokens",
        "has no function 'gone'",
        "has no function 'lost'",
        "mine.py:raises fails on each of the first",
    ):
        assert any(expected in line for line in found), f"{expected!r} is missing in\n" + "\n".join(found)


def test_refused_rows_are_counted_by_kind_and_can_be_accepted(shell: Shell) -> None:
    rows = [{**QUESTIONS[0], "question": "x" * 600}, {"answer": "2"}, *QUESTIONS[:27]]
    (shell.here / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows) + "no json\n")
    answer = run(shell, "--check")
    assert answer.code == 1
    assert "10.0 % of 30 rows (no question 1, malformed 1, too long 1) are refused (" in answer.text
    (share,) = re.findall(r"accept them with prompts\.max_refused_share = (0\.1\d)$", answer.text, re.M)
    answer = run(shell, "--check", prompts={"max_refused_share": float(share)})
    assert (answer.code, "(no question 1, malformed 1, too long 1) are refused" in answer.text) == (0, True), (
        answer.text
    )


def test_questions_that_cannot_fill_all_batches_are_named(shell: Shell) -> None:
    answer = run(shell, "--check", prompts={"epochs": 1, "samples_per_prompt": 4}, experience={"global_batch": 16})
    assert answer.code == 1
    expected = (
        "prompts.epochs: 39 questions × samples_per_prompt are 156 trajectories, but trainer.optimizer_steps = 80 × "
        "experience.global_batch = 16 need 1280: raise prompts.epochs, "
    )
    assert expected in answer.text
    assert "or lower trainer.optimizer_steps to 9" in answer.text
    trainer = {"optimizer_steps": 9, "learner": LEARNER}
    prompts = {"epochs": 1, "samples_per_prompt": 4}
    assert run(shell, "--check", prompts=prompts, experience={"global_batch": 16}, trainer=trainer).code == 0


def test_start_names_each_reward_that_fails(shell: Shell) -> None:
    reasons = {
        "raises": "KeyError: 'answr' (mine.py:5)",
        "string": "TypeError: returned str instead of a number",
        "nan": "ValueError: returned nan",
    }
    answer = run(shell, score={"rewards": [{"name": f"mine.py:{reward}"} for reward in reasons]})
    assert answer.code == 1
    for reward, reason in reasons.items():
        on_prompt = f"mine.py:{reward} fails on each of the first 8 prompts of task 'rows' with the response "
        assert re.search(f"{re.escape(on_prompt)}'# \\d+': {re.escape(reason)}", answer.text), answer.text


def test_module_that_is_a_file_here_is_named(shell: Shell) -> None:
    answer = run(shell, "--check", score={"rewards": [{"name": "my_reward:variety"}]})
    assert answer.code == 1
    expected = "there is no module 'my_reward' in Python's path; for the file in this directory write my_reward.py"
    assert expected in answer.text
    assert "importlib" not in answer.text


def test_user_code_that_hangs_is_named_after_the_time_out(shell: Shell) -> None:
    settings = {"check_timeout_s": 8.0}
    environment = {"environments": [{"name": "mine.py:Slow", "seconds": 1.0}]}
    rewards = {"rewards": [{"name": "slow.py:mine"}]}
    answer = run(shell, prompts={"environment": "Slow"}, run=settings, score=rewards, rollout=environment)
    assert answer.code == 1
    assert "the verifier took longer than 8 s. It may be slow, or the machine busy: raise run.check_timeout_s" in (
        answer.text
    )
    assert "Slow fails at its reset on the first prompt: " in answer.text
    assert "took longer than 1 s" in answer.text
    explained = shell("config", "--explain", "run.check_timeout_s")
    assert "run.check_timeout_s: number in seconds, at least 0 and finite, default 30" in explained.text


def test_tokenizer_that_is_damaged_is_named(shell: Shell) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (shell.here / "model" / name).write_text("{")
    answer = run(shell)
    assert answer.code == 1
    assert "laminar: model.path: the tokenizer cannot be used: " in answer.text
    assert "Traceback" not in answer.text


def test_missing_model_is_named_with_other_problems(shell: Shell) -> None:
    answer = run(shell, model={}, score={"rewards": [{"name": "mine.py:gone"}]})
    assert "model.path is not set: " in "\n".join(problems(answer))
    assert "has no function 'gone'" in answer.text


def test_chat_template_that_fails_is_named(shell: Shell) -> None:
    (shell.here / "model" / "chat_template.jinja").write_text("{{ raise_exception('Only poems.') }}")
    score = {"memory_limit_mb": 5, "rewards": [{"name": "mine.py:nan"}]}
    answer = run(shell, prompts={"chat_template": True}, score=score)
    assert answer.code == 1
    assert "Only poems." in answer.text
    assert "score.memory_limit_mb = 5 is too small: a process that has loaded no code of yours has " in answer.text


def test_doubtful_settings_are_warned_of(shell: Shell) -> None:
    algorithm = {"name": "grpo", "clip_high": 0.3}
    answer = run(
        shell,
        "--check",
        "--json",
        prompts={"samples_per_prompt": 6},
        experience={"global_batch": 16},
        trainer={"learner": {**LEARNER, "algorithm": algorithm}},
    )
    assert answer.code == 0, answer.text
    batch, clip, refused = answer.json["warnings"]
    assert batch.startswith("experience.global_batch = 16 is no multiple of samples_per_prompt = 6")
    assert "a clip without effect (clip_high)" in clip
    assert "2.5 % of 40 rows (no answer 1) are refused" in refused


WRONG: dict[str, Any] = {
    "prompts": {"max_token": 5, "heldout": "many", "samples_per_prompt": 0, "temperature": -1.0},
    "traner": {},
    "experience": {"global_batch": 0},
    "model": {"path": "nowhere"},
    "score": {"rewards": [{"name": "mine.py:raises"}]},
}
"""Unknown keys, a wrong type, values out of bounds, a wrong path, and a reward that raises."""
NAMED = (
    "unknown key prompts.max_token; did you mean 'max_new_tokens'?",
    "unknown key traner; did you mean 'trainer'?",
    "prompts.heldout: Input should be a valid integer",
    "prompts: samples_per_prompt must be at least 1, not 0",
    "prompts: temperature must be positive, not -1.0",
    "experience: global_batch must be at least 1, not 0",
    "model.path: there is no folder ",
    "mine.py:raises fails on each of the first 8 prompts",
)


def test_wrong_settings_files_and_code_are_named_at_once(shell: Shell) -> None:
    answer = run(shell, "--check", "--json", **WRONG)
    assert answer.code == 1
    found = answer.json["problems"]
    assert [[part in problem for problem in found].count(True) for part in NAMED] == [1] * len(NAMED), found
    assert len(found) == len(NAMED)
    lines = problems(run(shell, **WRONG))
    shown = [line.removeprefix("problem: ") for line in lines if line.startswith("problem: ")]
    assert shown == [problem.partition("\n")[0] for problem in found]


def test_problems_are_printed_before_slow_checks_begin(shell: Shell) -> None:
    answer = run(shell, "--check", prompts={"epochs": 1, "heldout_path": "gone.jsonl"})
    *before, last = answer.text.partition("checks the tokenizer")
    assert answer.code == 1
    assert [before[0].count(f"problem: {name}: ") for name in ("prompts.heldout_path", "prompts.epochs")] == [1, 1]
    assert last.endswith("mistaken.toml cannot start: 2 problems\n")
    assert before[0].index("problem: prompts.heldout_path") < before[0].index("loads the libraries")


@pytest.mark.parametrize("task", ["leg_counting", "countdown"])
def test_tasks_of_reasoning_gym_work_with_a_named_model(task: str, shell: Shell) -> None:
    """By its name alone: the model has room for any question, as a user's."""
    save_folder(*build_demo_model(DemoModelConfig(layers=1, max_positions=4096)), shell.here / "larger")
    table = {"model": {"path": "larger"}, "trainer": {"learner": LEARNER}, "run": {"check_timeout_s": 200.0}}
    (shell.here / "gym.toml").write_text(tomli_w.dumps(table))
    answer = shell("run", "gym.toml", "--check", "--set", f"prompts.task={task}")
    assert answer.code == 0, answer.text
    assert f"model and prompts ({task}) work, so do its rewards on the first prompts of each task" in answer.text


def test_environments_are_found_by_module_and_class(shell: Shell) -> None:
    for name in ("my_environment.py:Echo", "operators.rollout.environments.guess:Guess", "guess"):
        answer = run(shell, "--check", prompts={"environment": name}, score={"rewards": [{"name": "environment"}]})
        assert answer.code == 0, answer.text
        assert f"checks environment {name.rpartition(':')[2]}\n" in answer.text


def test_observations_without_room_for_a_turn_are_named(shell: Shell) -> None:
    for most, tokens, where in (
        (8, 11, "8 of the first 8 prompts, before"),
        (14, 18, "6 of the first 8 prompts, after"),
    ):
        prompts = {"environment": "my_environment.py:Echo", "max_new_tokens": most}
        answer = run(shell, "--check", prompts=prompts, score={"rewards": [{"name": "environment"}]})
        assert answer.code == (most == 8), answer.text
        room = f"{tokens} tokens of observations leave no room for a turn in an episode's max_new_tokens = {most}"
        assert f"Echo: on {where} the first turn {room}" in answer.text


def test_configurations_of_the_hooks_document_are_checked(shell: Shell) -> None:
    """With its own files; the agent's command is run by `tests/pipelines/test_hooks_document.py`."""
    write_files(shell.here)
    checks = {
        "functions": (with_functions(), ["environment Countdown", "sampler", "policy", "agents.function"]),
        "programs": (with_programs(shell.here), ["sampler"]),
    }
    for name, (table, checked) in checks.items():
        own = {"model": {"path": "model"}, "trainer": {"learner": LEARNER}, "run": {"check_timeout_s": 200.0}}
        (shell.here / f"{name}.toml").write_text(tomli_w.dumps({**table, **own}))
        answer = shell("run", f"{name}.toml", "--check", "--set", "prompts.max_refused_share=1")
        assert answer.code == 0, answer.text
        assert [part for part in checked if not re.search(f"checks .*{re.escape(part)}", answer.text)] == []
    (shell.here / "my_curriculum.py").unlink()
    answer = shell("run", "programs.toml", "--check")
    assert (answer.code, "my_curriculum.py" in answer.text) == (1, True), answer.text
