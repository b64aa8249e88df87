"""An untrained model and a configuration of eight small optimizer steps, with a process for each role."""

from __future__ import annotations

from pathlib import Path

import tomli_w

from infra.models.checkpoint_folder import save_folder
from infra.models.demo import build_demo_model
from infra.models.demo_config import DemoModelConfig

SMALL = {
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

LENGTH_REWARD = "score.rewards=[{name='length', options={target=0, limit=17}}]"
"""A reward that differs within a group: an untrained model never answers correctly, so it needs another signal."""


def make_model(folder: Path, layers: int = 3) -> Path:
    """Write an untrained demonstration model to the new folder `folder`."""
    save_folder(*build_demo_model(DemoModelConfig(layers=layers)), folder)
    return folder


def write_config(file: Path, model: Path) -> Path:
    """Write the configuration of a short run of the model in `model`."""
    file.write_text(tomli_w.dumps({"model": {"path": str(model)}, **SMALL}))
    return file
