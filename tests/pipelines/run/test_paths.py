"""Absolute paths of a configuration, and the files that a run reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelines.config import parse_config
from pipelines.run.paths import files_read, with_absolute_paths

TABLE: dict[str, Any] = {
    "run": {"folder": "runs"},
    "kafka": {"client_properties": "client.properties"},
    "model": {"path": "model"},
    "prompts": {"source": "jsonl", "path": "questions.jsonl", "heldout_path": "~/heldout.jsonl"},
    "rollout": {"emulation": {"lengths": {"file": "lengths.jsonl"}}},
    "relay": {"token_file": "token"},
    "score": {"rewards": [{"name": "exact"}, {"name": "deep/mine.py:judge", "weight": 2.0}, {"name": "mine:other"}]},
}


def test_with_absolute_paths_makes_all_paths_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    absolute = with_absolute_paths(parse_config(TABLE, "my.toml"))
    assert absolute.run.folder == tmp_path / "runs"
    assert absolute.model.path == str(tmp_path / "model")
    rewards = [(spec.name, spec.component, spec.weight) for spec in absolute.score.rewards]
    script = f"{tmp_path}/deep/mine.py"
    assert rewards == [("exact", "exact", 1.0), (f"{script}:judge", "judge", 2.0), ("mine:other", "other", 1.0)]
    assert dict(files_read(absolute)) == {
        "kafka.client_properties": tmp_path / "client.properties",
        "prompts.path": tmp_path / "questions.jsonl",
        "prompts.heldout_path": Path("/home/me/heldout.jsonl"),
        "rollout.emulation.lengths.file": tmp_path / "lengths.jsonl",
        "relay.token_file": tmp_path / "token",
        "score.rewards": Path(script),
    }
    monkeypatch.chdir("/")
    assert with_absolute_paths(absolute) == absolute


def test_with_absolute_paths_keeps_empty_paths() -> None:
    assert not list(files_read(with_absolute_paths(parse_config({}, "my.toml"))))
