"""The warm start of a run: a small model made in code, taught enough that reinforcement learning has a start."""

from __future__ import annotations

import json
import time
from pathlib import Path

from infra.files import write_atomically
from pipelines.config import Config

PROGRESS_FILE = "warm_start.json"


def warm_start_cache(config: Config) -> Path:
    """Where warm starts are kept: beside the runs, shared by them."""
    return config.run.folder / "warm-starts"


def make_warm_start(config: Config) -> None:
    """Make the warm start that `config` asks for, or find it in the cache; the progress file says how it goes."""
    from operators.trainer.warm_start import warm_start

    assert config.warm_start is not None
    file = config.run_folder / PROGRESS_FILE
    started = time.monotonic()

    def report(progress: float, stage: str) -> None:
        state = {"progress": progress, "stage": stage, "seconds": time.monotonic() - started}
        write_atomically(file, json.dumps(state))

    made = warm_start(config.warm_start, warm_start_cache(config), report)
    write_atomically(
        file, json.dumps({"progress": 1.0, "stage": "done", "folder": str(made.folder), **made.accuracies()})
    )
