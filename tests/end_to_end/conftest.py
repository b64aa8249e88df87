"""What tests of whole runs share: a small model, a configuration of a short run, and a place to start runs from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tomli_w
from laminar_runs import LaminarRun, Nursery

from infra.models.checkpoint_folder import save_folder
from infra.models.demo import build_demo_model
from infra.models.demo_config import DemoModelConfig

SMALL = {
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

StartRun = Callable[..., LaminarRun]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained demonstration model: whatever it learns, a run with it is a run."""
    folder = tmp_path_factory.mktemp("model") / "demo"
    save_folder(*build_demo_model(DemoModelConfig()), folder)
    return folder


@pytest.fixture(scope="session")
def nursery(model_folder: Path) -> Iterator[Nursery]:
    nursery = Nursery(model_folder)
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def small_config(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration of eight small optimizer steps."""
    file = tmp_path_factory.mktemp("config") / "small.toml"
    file.write_text(tomli_w.dumps({"model": {"path": str(model_folder)}, **SMALL}))
    return file


@pytest.fixture(scope="module")
def start_run(nursery: Nursery, small_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartRun]:
    """Starts a run with the given name and changes to the small configuration; what is left of it is killed."""
    started: list[LaminarRun] = []

    def start(name: str, *changes: str) -> LaminarRun:
        run = LaminarRun(nursery, tmp_path_factory.mktemp("here"), small_config, name, *changes)
        started.append(run)
        return run

    yield start
    for run in started:
        run.end()
