"""Fixtures of tests of whole runs: a small model, a configuration of a short run, and a server that starts commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w
from laminar_runs import CommandServer, LaminarRun, StartRun
from small_runs import EMULATED, make_model, write_config


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "demo")


@pytest.fixture(scope="module", autouse=True)
def programs_are_killed(killed_programs: None) -> None:
    """Every module here kills programs."""


@pytest.fixture(scope="session")
def command_server(model_folder: Path, killed_folder: Path) -> Iterator[CommandServer]:
    command_server = CommandServer(model_folder, killed_folder)
    yield command_server
    command_server.close()


@pytest.fixture(scope="session")
def small_config(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("config") / "small.toml", model_folder)


@pytest.fixture(scope="session")
def emulated_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("config") / "emulated.toml"
    file.write_text(tomli_w.dumps(EMULATED))
    return file


@pytest.fixture(scope="module")
def start_run(
    command_server: CommandServer, small_config: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartRun]:
    """Start a run with the given name and changes to a configuration; kill its processes after the test."""
    started: list[LaminarRun] = []

    def start(name: str, *changes: str, config: Path = small_config, here: Path | None = None) -> LaminarRun:
        run = LaminarRun(command_server, here or tmp_path_factory.mktemp("here"), config, name, *changes)
        started.append(run)
        return run

    yield start
    for run in started:
        run.clean_up()
