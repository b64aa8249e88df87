"""The sides of benchmarks/end_to_end.py beside Laminar: the plain loop of benchmarks/control.py, and TRL."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.control import ENGINE, PARTS, read_steps
from benchmarks.measures import SETTLED_AFTER, EngineUse, Step
from benchmarks.sides import LIMIT_S, Side, Work
from infra.models.checkpoint_folder import load_tokenizer
from operators.prompts.config import PromptsConfig
from operators.prompts.rendering import prompt_text
from operators.prompts.sources import open_source
from operators.trainer.algorithms import resolve
from pipelines.config import Config, save_config

TRL_PYTHON = Path(".venv-trl/bin/python")
TRL_MODULE = "benchmarks.trl.grpo"
CONTROL_MODULE = "benchmarks.control"
SECONDS_A_BATCH = "cpu_seconds_a_batch"
"""Figure of the control's engine: CPU seconds in its steps."""


def run_control(work: Work, model: Path, *, threads: int) -> Side:
    """Train in a plain loop on `threads` cores, with one thread on each. Raises RuntimeError if it fails."""
    _check_prompts(work.config.prompts)
    out = _empty_folder(work, f"control-{threads}")
    file = out / "config.toml"
    save_config(work.training(model), file)
    files = [str(file), "--model", str(model), "--out", str(out)]
    result = _run([sys.executable, "-m", CONTROL_MODULE, *files, "--threads", str(threads)], out, threads)
    lines = read_steps(out / "steps.jsonl")
    settled = [line for line in lines if line["step"] > SETTLED_AFTER]
    parts = {part: sum(line[f"cpu/{part}"] for line in settled) / len(settled) for part in PARTS} if settled else {}
    use = EngineUse(*(sum(line[key] for line in settled) for key in ("tokens", "engine_steps", ENGINE)))
    a_batch = {SECONDS_A_BATCH: use.model_seconds / len(settled)} if settled else {}
    return replace(_side(work, lines, result, parts), engine=use.figures() | a_batch)


def run_trl(work: Work, model: Path, *, threads: int, ranks: int = 1) -> Side:
    """Train with TRL in `ranks` processes of `threads` threads each. Raises RuntimeError if it fails."""
    if not TRL_PYTHON.exists():
        raise RuntimeError(f"{TRL_PYTHON} does not exist: run `make trl-env`")
    _check_prompts(work.config.prompts)
    out = _empty_folder(work, f"trl-{ranks}x{threads}")
    write_questions(work.training(model), model, out / "questions.jsonl")
    files = ["--model", str(model), "--questions", str(out / "questions.jsonl"), "--out", str(out)]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [str(TRL_PYTHON), *launcher, "-m", TRL_MODULE, *files, *_trl_settings(work, threads)]
    result = _run(command, out, threads)
    of_ranks = [read_steps(file) for file in (out / "steps.jsonl", *sorted(out.glob("rank-*/steps.jsonl")))]
    lines = [_joined(lines) for lines in zip(*of_ranks, strict=True)]
    settled = [line for line in lines if line["step"] >= SETTLED_AFTER]
    spent = [b["cpu"] - a["cpu"] for a, b in pairwise(settled)]
    result["threads"] = f"{ranks} × {threads}" if ranks > 1 else str(threads)
    return _side(work, lines, result, {"trl": sum(spent) / len(spent)} if spent else {})


def write_questions(config: Config, model: Path, file: Path) -> None:
    """Write the questions of the prompts pipeline, in its order, for benchmarks/trl/grpo.py."""
    count = config.trainer.optimizer_steps * (config.experience.global_batch // config.prompts.samples_per_prompt)
    tokenizer = load_tokenizer(model)
    source = open_source(config.prompts)
    try:
        with file.open("w") as lines:
            for question in map(source.__getitem__, range(count)):
                row = {
                    "prompt": prompt_text(question, config.prompts, tokenizer),
                    "task": question.task,
                    "reference": question.reference,
                }
                lines.write(json.dumps(row) + "\n")
    finally:
        source.close()


def _check_prompts(prompts: PromptsConfig) -> None:
    """Raise RuntimeError for prompts that Laminar alone would render or stop in this way."""
    names = ("tasks", "template", "chat_template", "environment", "stop")
    if other := [name for name in names if getattr(prompts, name) != getattr(PromptsConfig, name)]:
        raise RuntimeError(f"prompts.{other[0]} applies to Laminar's side alone: the others have plain questions")


def _empty_folder(work: Work, side: str) -> Path:
    out = work.folder / f"{work.name}-{side}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    return out


def _run(command: Sequence[str], out: Path, threads: int) -> dict[str, Any]:
    """Run `command`, which writes result.json to `out`, and return that. Raises RuntimeError if it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    started_at = time.time()
    with (out / "log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=log, env=environment, timeout=LIMIT_S)
    if not (out / "result.json").exists():
        raise RuntimeError(f"{out.name} failed: see {log.name}")
    result: dict[str, Any] = json.loads((out / "result.json").read_text("utf-8"))
    return result | {"started_at": started_at}


def _joined(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One step of several ranks: it ends with the last of them, the CPU time is that of all, the reward their mean."""
    return {
        "step": ranks[0]["step"],
        "ended": max(line["ended"] for line in ranks),
        "cpu": sum(line["cpu"] for line in ranks),
        "reward": sum(line["reward"] for line in ranks) / len(ranks),
    }


def _side(work: Work, lines: Sequence[Mapping[str, Any]], result: Mapping[str, Any], cpu: dict[str, float]) -> Side:
    batch = work.config.experience.global_batch
    return Side(
        steps=[Step(line["step"], line["ended"], line["reward"], line["step"] * batch) for line in lines],
        threads=str(result["threads"]),
        versions=result["versions"],
        start_up_seconds=result["began_at"] - result["started_at"],
        cpu_seconds_per_batch=cpu,
        outside_model={},
    )


def _trl_settings(work: Work, threads: int) -> list[str]:
    config, learner = work.config, work.config.trainer.learner
    algorithm = resolve(learner.algorithm)
    if learner.algorithm.name != "grpo" or learner.schedule != "constant" or learner.weight_decay:
        raise RuntimeError(
            "the comparison with TRL supports only algorithm grpo with a constant learning rate and no weight decay"
        )
    prompts = config.experience.global_batch // config.prompts.samples_per_prompt
    settings: dict[str, Any] = {
        "steps": config.trainer.optimizer_steps,
        "prompts": prompts,
        "samples": config.prompts.samples_per_prompt,
        "max-new-tokens": config.prompts.max_new_tokens,
        "temperature": config.prompts.temperature,
        "answer-marker": config.score.answer_marker,
        "learning-rate": learner.learning_rate,
        "warmup-steps": learner.warmup_steps,
        "clip-low": algorithm.clip.low,
        "clip-high": algorithm.clip.high,
        "max-gradient-norm": learner.max_gradient_norm,
        "seed": config.run.seed,
        "threads": threads,
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return [*flags, "--betas", *map(str, learner.betas)]
