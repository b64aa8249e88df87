"""Each pipeline alone: `laminar submit` against a broker, drained by SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w
from laminar_runs import Command, Nursery
from small_runs import SMALL

from infra.kafka.broker import Broker
from infra.store.names import default_root
from infra.store.ownership import remove_store
from pipelines.roles import PIPELINES, Role
from schemas.topics import group_name

RUN = "submitted"


@pytest.fixture(scope="module")
def config(broker: Broker, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The configuration of a run that nobody has started."""
    folder = tmp_path_factory.mktemp("submit")
    known = {
        "run": {"name": RUN, "folder": str(folder / "runs")},
        "kafka": {"bootstrap_servers": broker.bootstrap_servers},
        "model": {"path": str(model_folder)},
    }
    (folder / "config.toml").write_text(tomli_w.dumps({**SMALL, **known}))
    yield folder / "config.toml"
    remove_store(default_root(RUN))


def submit(nursery: Nursery, here: Path, *words: str) -> Command:
    return Command(nursery, here, "submit", *words)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_pipeline_runs_alone_until_it_is_stopped(
    pipeline: str, nursery: Nursery, config: Path, tmp_path: Path
) -> None:
    command = submit(nursery, tmp_path, pipeline, str(config))
    try:
        started = f"start 1 of {group_name(RUN, pipeline)}"
        command.until(lambda: started in command.said(), 60, f"the start of {Role(pipeline).name}")
        command.signal(signal.SIGTERM)
        assert command.wait(15) == 0, command.said()
        assert "Traceback" not in command.said()
        assert not command.processes()
    finally:
        command.end()


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (("scores", "CONFIG"), 2, "there is no pipeline 'scores'; there are prompts, placement"),
        (("score", "nowhere.toml"), 1, "there is no config file nowhere.toml"),
        (("score", "CONFIG", "--set", "run.name=''"), 1, "run.name is not set"),
        (("rollout", "CONFIG", "--replica", "8"), 1, "would host replica 8, but there are inboxes for 8"),
        (("score", "CONFIG", "--replica", "1"), 2, "--replica is for rollout"),
        (("trainer", "CONFIG", "--set", "model.path=''"), 1, "model.path is not set"),
        (("score", "CONFIG", "--runner", "spark"), 2, "spark"),
    ],
)
def test_what_cannot_be_submitted_is_named(
    words: tuple[str, ...], code: int, expected: str, nursery: Nursery, config: Path, tmp_path: Path
) -> None:
    command = submit(nursery, tmp_path, *(str(config) if word == "CONFIG" else word for word in words))
    assert command.wait(30) == code
    assert expected in " ".join(command.said().replace("│", " ").split())
