"""The warm start of a run: a small model made in code, taught enough that reinforcement learning has a start."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace

from infra.files import write_atomically
from operators.prompts.sources import heldout_questions, open_source
from pipelines.config import Config

PROGRESS_FILE = "warm_start.json"
CACHE = "warm-starts"
"""Beside the runs, shared by them."""
REPORT_EVERY_S = 0.5


def make_warm_start(config: Config) -> None:
    """Make the warm start that `config` asks for, or find it; the run's progress file says how it goes.

    It learns from questions of the same source under another seed, none of which is held out.
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
    source = open_source(replace(config.prompts, seed=config.prompts.seed + 1_000_003))
    try:
        entries = [
            source[number].reference for number in range(min(learning.examples, source.total or learning.examples))
        ]
    finally:
        source.close()
    heldout = [
        question.reference for question in itertools.islice(heldout_questions(config.prompts), learning.measured)
    ]
    made = warm_start(learning, entries, heldout, config.run.folder / CACHE, report)
    done = {
        "progress": 1.0,
        "stage": "done",
        "seconds": time.monotonic() - started,
        "folder": str(made.folder),
        "accuracy/greedy": made.greedy,
        "accuracy/sampled": made.sampled,
        "best": made.best,
    }
    write_atomically(file, json.dumps(done))
