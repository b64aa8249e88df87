"""An untrained model and configurations of short runs: eight small optimizer steps, or emulated ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w

from infra.models.checkpoint_folder import save_folder
from infra.models.demo import build_demo_model
from infra.models.demo_config import DemoModelConfig

SMALL: dict[str, Any] = {
    "run": {"layout": "isolated"},
    "prompts": {
        "task": "chain_sum",
        "task_args": {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1},
        "heldout": 8,
        "max_new_tokens": 16,
        "samples_per_prompt": 4,
    },
    "experience": {"global_batch": 16},
    "trainer": {"optimizer_steps": 8, "checkpoint_every": 3},
    "rollout": {"slots": 16},
}

EMULATED: dict[str, Any] = {
    "run": {"time_scale": 100.0, "layout": "compact"},
    "prompts": {"source": "synthetic", "prompt_tokens": 32, "max_new_tokens": 224, "samples_per_prompt": 4},
    "rollout": {
        "engine": "emulated",
        "replicas": 4,
        "slots": 16,
        "context": 256,
        "kv_capacity": 2048,
        "emulation": {"stride": 8, "lengths": {"p50": 40, "p99": 224}},
    },
    "score": {"answer": "whole", "rewards": [{"name": "length", "options": {"target": 10, "limit": 200}}]},
    "experience": {"global_batch": 32},
    "trainer": {"optimizer_steps": 4, "emulation": {"step_s": [[0, 10], [100_000, 20]]}},
}
"""A run without a model: engines and trainer only simulate their durations."""

COMPACT = "run.layout=compact"
"""Of a run whose roles are not killed: it starts in half the time of a process for each role."""

LENGTH_REWARD = "score.rewards=[{name='length', options={target=0, limit=17}}]"
"""A reward that differs within a group: an untrained model never answers correctly, so it needs another signal."""


def make_model(folder: Path, layers: int = 3) -> Path:
    """Write an untrained demonstration model to the new folder `folder`."""
    save_folder(*build_demo_model(DemoModelConfig(layers=layers)), folder)
    return folder


def write_config(file: Path, model: Path) -> Path:
    """Write the configuration of a short run of the model in `model`, with a process for each role."""
    file.write_text(tomli_w.dumps({"model": {"path": str(model)}, **SMALL}))
    return file
