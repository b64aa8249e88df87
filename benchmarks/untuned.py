"""Tasks for which nothing was tuned: reward before and after reinforcement learning with default settings.

    OMP_NUM_THREADS=1 nice -n 10 python -m benchmarks.untuned
    OMP_NUM_THREADS=1 python -m benchmarks.untuned --tasks lcm --seeds 0
    OMP_NUM_THREADS=1 python -m benchmarks.untuned --set trainer.learner.learning_rate=1e-4

Four tasks of reasoning-gym, chosen for their short questions before anything was measured. A small model first imitates
the bare answers of 20,000 questions, with the default settings of a warm start. Then it learns from the verifier in a
plain loop over the engine, the learner and the questions of a run, every setting at its default but those of `--set`:
the default learning rate is for pretrained models of a billion parameters, so it hardly changes this one. Each result
is saved as soon as it is measured; run again, the command measures only what is missing. `--known` only prints saved
results.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from rich.console import Console
from rich.table import Table

from benchmarks.evidence_arms import reinforcement_arm, sample
from benchmarks.recipe import Loop, numbered_questions
from benchmarks.results import Result, Results, add_results
from infra.models.checkpoint_folder import save_folder
from infra.models.demo import build_demo_model
from infra.models.weights import save_weights
from operators.prompts.sources import heldout_questions
from operators.trainer.imitation import Example, LearningRates, imitate
from operators.trainer.warm_start import bare_answer
from operators.trainer.warm_start_config import WarmStartConfig
from pipelines.config import Config, load_config
from pipelines.present.report.machine import describe_machine

TASKS = ("basic_arithmetic", "count_bits", "fraction_simplification", "lcm")
TEACHER_SEED = 1_000_003
"""Added to the seed of the run's questions for those that the model imitates."""
REPEATED_IN = 200
"""Questions whose common beginning and end become tokens."""


def main() -> None:
    """Measure the missing cells and print the table."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--tasks", nargs="+", default=list(TASKS))
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--heldout", type=int, default=256)
    arguments.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting to change")
    add_results(arguments, "runs/untuned.json")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    done = Results(options.results)
    for seed, task in [] if options.known else itertools.product(options.seeds, options.tasks):
        cell = task, seed, options.heldout
        done.add(key_of(*cell, WarmStartConfig(), options.set), partial(measure, *cell, WarmStartConfig(), options.set))
    rows = {task: row for task in options.tasks if (row := row_of(task, options, done))}
    if options.json:
        print(json.dumps({"machine": describe_machine(), "set": options.set, "tasks": rows}))
    else:
        show(rows, options.set)


def key_of(task: str, seed: int, heldout: int, teaching: WarmStartConfig, changes: Sequence[str]) -> str:
    """The key of a result: its settings, and a hash of all settings, so that changed defaults are measured again."""
    config = config_of(task, seed, heldout, changes)
    sections = repr((teaching, config.prompts, config.score, config.experience, config.trainer))
    settings = blake3(sections.encode()).hexdigest()[:12]
    return ", ".join([task, f"seed {seed}", f"{heldout} held out", *changes, settings])


def config_of(task: str, seed: int, heldout: int, changes: Sequence[str]) -> Config:
    """The configuration of a result: every setting at its default but those of `changes`."""
    with tempfile.NamedTemporaryFile(suffix=".toml") as empty:
        settings = [f"run.seed={seed}", f"prompts.task={task}", f"prompts.heldout={heldout}", *changes]
        return load_config(Path(empty.name), settings)


def measure(task: str, seed: int, heldout: int, teaching: WarmStartConfig, changes: Sequence[str] = ()) -> Result:
    """Rewards and greedy accuracies on held-out questions before and after, and the rewards of training."""
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch, "model")
        config = config_of(task, seed, heldout, [f"model.path={model}", *changes])
        teach(config, teaching, model)
        loop = Loop(config, model, Path(scratch))
        save_weights(loop.learner.model, loop.weights(0))
        greedy, reward = loop.accuracy(0, 0.0), heldout_reward(loop)
        result = reinforcement_arm(loop)
        return {
            "greedy": (greedy, result["greedy"]),
            "reward": (reward, heldout_reward(loop)),
            "training": (statistics.fmean(result["rewards"][:5]), statistics.fmean(result["rewards"][-5:])),
            "cpu": result["cpu"],
        }


def teach(config: Config, teaching: WarmStartConfig, folder: Path) -> None:
    """Save to `folder` a small model that has imitated the bare answers to questions of the run's task."""
    heldout = {question.text for question in heldout_questions(config.prompts)}
    drawn = numbered_questions(replace(config.prompts, seed=config.run.seed + TEACHER_SEED))
    questions = [each for each in itertools.islice(drawn, teaching.examples) if each.text not in heldout]
    model, tokenizer = build_demo_model(
        replace(
            teaching.model, task=config.prompts.task, seed=config.run.seed,
            phrases=repeated([question.text for question in questions[:REPEATED_IN]]),
        )
    )  # fmt: skip
    imitate(
        model,
        [
            Example(
                tokenizer.encode(each.text), [*tokenizer.encode(bare_answer(each.reference)), tokenizer.eos_token_id]
            )
            for each in questions
        ],
        steps=teaching.steps,
        batch=teaching.batch,
        rates=LearningRates(teaching.learning_rate, teaching.matrix_learning_rate),
        warmup=teaching.warmup,
        seed=config.run.seed,
    )
    model.set_attn_implementation("sdpa")
    save_folder(model, tokenizer, folder)


def repeated(texts: Sequence[str]) -> tuple[str, ...]:
    """What all `texts` begin and end with, without digits, so that it can be one token each."""
    first = _common_beginning(texts)
    rest = [text[len(first) :] for text in texts]
    last = _common_beginning([text[::-1] for text in rest])[::-1]
    return tuple(text for text in (first.rstrip("0123456789-"), last.lstrip("0123456789")) if text)


def _common_beginning(texts: Sequence[str]) -> str:
    low, high = min(texts), max(texts)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(low, high, strict=False))
    return "".join(letter for letter, _ in same)


def heldout_reward(loop: Loop) -> float:
    """The mean reward of sampled answers of the loaded weights to the held-out questions."""
    return statistics.fmean(sample(loop, loop.heldout_questions, 2).rewards)


def row_of(task: str, options: argparse.Namespace, done: Results) -> dict[str, Any]:
    """The results of `task` by seed; empty without results."""
    keys = (key_of(task, seed, options.heldout, WarmStartConfig(), options.set) for seed in options.seeds)
    found = [each for key in keys if (each := done.get(key))]
    return {key: [each[key] for each in found] for key in ("reward", "greedy", "training", "cpu")} if found else {}


def show(rows: Mapping[str, Mapping[str, Any]], changes: Sequence[str] = ()) -> None:
    """Print the table: before and after, by seed."""
    settings = " but ".join(["default settings", *changes])
    table = Table(title=f"{settings}, held-out questions, before → after by seed", title_justify="left")
    for column in ("task", "reward, sampled", "greedy accuracy", "training reward"):
        table.add_column(column)
    for task, row in rows.items():
        cells = ["  ".join(f"{a:.2f} → {b:.2f}" for a, b in row[key]) for key in ("reward", "greedy", "training")]
        table.add_row(task, *cells)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
