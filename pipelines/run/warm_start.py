"""The warm start of a run: a small model, created in code and trained by supervised learning before RL starts."""

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
from operators.prompts.sources import all_heldout_questions, open_source
from operators.trainer.warm_start_record import PROCEDURE, WarmStart, read_warm_start
from pipelines.config import Config

PROGRESS_FILE = "warm_start.json"
CACHE = "warm-starts"
"""Folder beside the runs, shared by them."""
INDEX = "known"
"""Subfolder of CACHE that maps configurations to warm starts, so that a run finds its own without drawing questions."""
REPORT_EVERY_S = 0.5
SEED_OFFSET = 1_000_003


def find_warm_start(config: Config) -> Mapping[str, Any] | None:
    """The progress of the warm start of `config` if it is in the cache, else None."""
    index_file = _index_file(config)
    try:
        return _completed(read_warm_start(config.run.folder / CACHE / index_file.read_text("utf-8")), 0.0)
    except (OSError, ValueError):
        return None


def make_warm_start(config: Config) -> None:
    """Create the warm start of `config`, or find it in the cache; writes the run's progress file.

    Its questions are those of `warm_start_questions`.
    """
    from operators.trainer.warm_start import warm_start  # deferred: imports torch, which the supervisor must not

    settings = config.warm_start
    assert settings is not None
    file = config.run_folder / PROGRESS_FILE
    started = time.monotonic()
    written_at = 0.0

    def report(progress: float, stage: str) -> None:
        nonlocal written_at
        now = time.monotonic()
        if now - written_at >= REPORT_EVERY_S:
            written_at = now
            state = {"progress": progress, "stage": stage, "seconds": now - started}
            write_atomically(file, json.dumps(state))

    report(0.0, "drawing questions")
    entries, heldout = warm_start_questions(config)
    result = warm_start(settings, entries, heldout, config.run.folder / CACHE, report)
    index_file = _index_file(config)
    index_file.parent.mkdir(exist_ok=True)
    write_atomically(index_file, result.folder.name)
    write_atomically(file, json.dumps(_completed(result, time.monotonic() - started)))


def warm_start_questions(config: Config) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """The entries that the teachers of `config`'s warm start answer, and the held-out ones that measure it.

    Both are of the tasks equal to `model.task`. The former are drawn under another seed than the run's, and from the
    first level of a curriculum: what only later levels ask is left to reinforcement learning.
    """
    settings = config.warm_start
    assert settings is not None
    tasks = [task for task in config.prompts.mixture if task.task == settings.model.task]
    weight = sum(task.weight for task in tasks)
    entries = [entry for task in tasks for entry in _entries(task, round(settings.examples * task.weight / weight))]
    questions = (question for task, question in all_heldout_questions(config.prompts) if task in tasks)
    return entries, [question.reference for question in itertools.islice(questions, settings.measured)]


def _entries(task: TaskConfig, count: int) -> list[Mapping[str, Any]]:
    """`count` training entries of `task`, fewer if its dataset is smaller."""
    first = task.for_level(0) if task.levels else task
    source = open_source(replace(first, seed=task.seed + SEED_OFFSET))
    try:
        return [source[number].reference for number in range(min(count, source.total or count))]
    finally:
        source.close()


def _completed(result: WarmStart, seconds: float) -> dict[str, Any]:
    return {
        "progress": 1.0,
        "stage": "done",
        "seconds": seconds,
        "folder": str(result.folder),
        "accuracy/greedy": result.greedy,
        "accuracy/sampled": result.sampled,
        "best": result.best,
    }


def _index_file(config: Config) -> Path:
    """The cache file with the folder name for this configuration; data files count by size and modification time."""
    paths = [Path(path) for task in config.prompts.mixture for path in (task.path, task.heldout_path) if path]
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    generator = importlib.metadata.version("reasoning-gym")
    inputs = [
        PROCEDURE,
        asdict(config.warm_start) if config.warm_start else None,
        asdict(config.prompts),
        files,
        generator,
    ]
    key = blake3(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]
    return config.run.folder / CACHE / INDEX / key
