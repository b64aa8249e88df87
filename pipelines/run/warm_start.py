"""The warm start of a run: a small model made in code, taught enough that reinforcement learning has a start."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from infra.files import write_atomically
from operators.prompts.config import TaskConfig
from operators.prompts.sources import heldout_of_all, open_source
from operators.trainer.warm_start_record import PROCEDURE, WarmStart, read_warm_start
from pipelines.config import Config

PROGRESS_FILE = "warm_start.json"
CACHE = "warm-starts"
"""Beside the runs, shared by them."""
KNOWN = "known"
"""In it: which configurations led to which folder, so that a run can find its own without drawing the questions."""
REPORT_EVERY_S = 0.5
SEED_APART = 1_000_003


def find_warm_start(config: Config) -> Mapping[str, Any] | None:
    """What the progress file would say of the warm start that `config` asks for, if it is known to be made."""
    known = _known(config)
    try:
        return _done(read_warm_start(config.run.folder / CACHE / known.read_text("utf-8")), 0.0)
    except (OSError, ValueError):
        return None


def make_warm_start(config: Config) -> None:
    """Make the warm start that `config` asks for, or find it; the run's progress file says how it goes.

    It learns from questions under another seed, none of which is held out: of the tasks that are `model.task`.
    """
    from operators.trainer.warm_start import warm_start  # here: it imports torch, and the supervisor imports this file

    learning = config.warm_start
    assert learning is not None
    file = config.run_folder / PROGRESS_FILE
    started = time.monotonic()
    told = 0.0

    def report(progress: float, stage: str) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= REPORT_EVERY_S:
            told = now
            state = {"progress": progress, "stage": stage, "seconds": now - started}
            write_atomically(file, json.dumps(state))

    report(0.0, "drawing questions")
    taught = [task for task in config.prompts.mixture if task.task == learning.model.task]
    weight = sum(task.weight for task in taught)
    entries = [entry for task in taught for entry in _entries(task, round(learning.examples * task.weight / weight))]
    asked = (question for task, question in heldout_of_all(config.prompts) if task in taught)
    heldout = [question.reference for question in itertools.islice(asked, learning.measured)]
    made = warm_start(learning, entries, heldout, config.run.folder / CACHE, report)
    known = _known(config)
    known.parent.mkdir(exist_ok=True)
    write_atomically(known, made.folder.name)
    write_atomically(file, json.dumps(_done(made, time.monotonic() - started)))


def _entries(task: TaskConfig, count: int) -> list[Mapping[str, Any]]:
    """`count` entries of `task` to learn from, fewer where it has no more."""
    source = open_source(replace(task, seed=task.seed + SEED_APART))
    try:
        return [source[number].reference for number in range(min(count, source.total or count))]
    finally:
        source.close()


def _done(made: WarmStart, seconds: float) -> dict[str, Any]:
    return {
        "progress": 1.0,
        "stage": "done",
        "seconds": seconds,
        "folder": str(made.folder),
        "accuracy/greedy": made.greedy,
        "accuracy/sampled": made.sampled,
        "best": made.best,
    }


def _known(config: Config) -> Path:
    """The file that names the folder of what this configuration leads to; what files hold goes by size and time."""
    paths = [Path(path) for task in config.prompts.mixture for path in (task.path, task.heldout_path) if path]
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    drawn_by = importlib.metadata.version("reasoning-gym")
    what = [
        PROCEDURE,
        asdict(config.warm_start) if config.warm_start else None,
        asdict(config.prompts),
        files,
        drawn_by,
    ]
    key = blake3(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
    return config.run.folder / CACHE / KNOWN / key
