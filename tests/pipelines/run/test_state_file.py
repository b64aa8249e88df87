"""state.json: the current state of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pipelines.inspect.run_files import STATE_FILE
from pipelines.run.state import RunStateFile, link_latest


@pytest.fixture
def state(tmp_path: Path) -> RunStateFile:
    return RunStateFile(tmp_path, "r", 8)


def written(state: RunStateFile) -> dict[str, Any]:
    return dict(json.loads((state.folder / STATE_FILE).read_text()))


def test_state_file_has_process_and_phase(state: RunStateFile) -> None:
    state.enter_phase("broker")
    assert written(state)["pid"] == os.getpid()
    assert written(state)["phase"] == "broker"
    assert list(written(state)["phases"]) == ["starting"]
    assert written(state)["ended_at"] is None


@pytest.mark.parametrize(
    ("error", "phase", "expected"), [(None, "", "ended"), ("it broke", "", "failed"), ("Ctrl-C", "stopped", "stopped")]
)
def test_state_file_after_the_end_has_no_live_role(
    error: str | None, phase: str, expected: str, state: RunStateFile
) -> None:
    state.set_roles({"score": {"pid": 17, "restarts": 2, "alive": True, "status": "up"}})
    state.end(error, phase)
    state_json = written(state)
    assert state_json["roles"] == {"score": {"pid": None, "restarts": 2, "alive": False, "status": "ended"}}
    assert (state_json["phase"], state_json["error"]) == (expected, error)
    assert state_json["ended_at"] >= state_json["started_at"]


def test_state_file_is_written_only_on_a_change(state: RunStateFile) -> None:
    state.set_roles({"score": {"pid": 17}})
    (state.folder / STATE_FILE).unlink()
    state.set_roles({"score": {"pid": 17}})
    assert not (state.folder / STATE_FILE).exists()
    state.set_roles({"score": {"pid": 18}})
    assert written(state)["roles"] == {"score": {"pid": 18}}


def test_link_latest_points_to_the_newest_run(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        link_latest(tmp_path / name)
        assert (tmp_path / "latest").resolve() == tmp_path / name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "latest"]
