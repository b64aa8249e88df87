"""What tests of whole runs share: a small model, a configuration of a short run, and a place to start runs from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from laminar_runs import LaminarRun, Nursery
from small_runs import make_model, write_config

StartRun = Callable[..., LaminarRun]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "demo")


@pytest.fixture(scope="session")
def nursery(model_folder: Path) -> Iterator[Nursery]:
    nursery = Nursery(model_folder)
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def small_config(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("config") / "small.toml", model_folder)


@pytest.fixture(scope="module")
def start_run(nursery: Nursery, small_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartRun]:
    """Starts a run of the given name, with changes to the small configuration; what is left of it is killed."""
    started: list[LaminarRun] = []

    def start(name: str, *changes: str, here: Path | None = None) -> LaminarRun:
        run = LaminarRun(nursery, here or tmp_path_factory.mktemp("here"), small_config, name, *changes)
        started.append(run)
        return run

    yield start
    for run in started:
        run.end()
