"""Absolute paths of a configuration, and the files that a run reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from pipelines.config import load_config, parse_config
from pipelines.run.paths import files_read, with_absolute_paths
from pipelines.run.preflight import missing_file

TABLE: dict[str, Any] = {
    "run": {"folder": "runs"},
    "kafka": {"client_properties": "client.properties"},
    "model": {"path": "model"},
    "prompts": {"source": "jsonl", "path": "questions.jsonl", "heldout_path": "~/heldout.jsonl"},
    "rollout": {"emulation": {"lengths": {"file": "lengths.jsonl"}}},
    "relay": {"token_file": "token"},
    "trainer": {"learner": {"name": "deep/learner.py:Own"}},
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
        "trainer.learner": tmp_path / "deep" / "learner.py",
    }
    monkeypatch.chdir("/")
    assert with_absolute_paths(absolute) == absolute


def test_paths_in_a_file_are_relative_to_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, elsewhere = tmp_path / "mine", tmp_path / "elsewhere"
    for each in (folder, elsewhere):
        each.mkdir()
    table = {**TABLE, "prompts": {**TABLE["prompts"], "environment": "game.py:Guess"}}
    (folder / "my.toml").write_text(tomli_w.dumps(table))
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", "/home/me")
    changes = ["prompts.path=other.jsonl", "kafka.client_properties=/etc/my.properties"]
    config = with_absolute_paths(load_config(Path("../mine/my.toml"), changes))
    beside = elsewhere / "../mine"
    assert config.run.folder == elsewhere / "runs"  # results belong to the working directory
    assert config.model.path == f"{beside}/model"
    assert [spec.name for spec in config.score.rewards] == ["exact", f"{beside}/deep/mine.py:judge", "mine:other"]
    assert [spec.name for spec in config.rollout.environments] == [f"{beside}/game.py:Guess"]
    assert dict(files_read(config)) == {
        "kafka.client_properties": Path("/etc/my.properties"),
        "prompts.path": elsewhere / "other.jsonl",
        "prompts.heldout_path": Path("/home/me/heldout.jsonl"),
        "rollout.environments": beside / "game.py",
        "rollout.emulation.lengths.file": beside / "lengths.jsonl",
        "relay.token_file": beside / "token",
        "score.rewards": beside / "deep/mine.py",
        "trainer.learner": beside / "deep/learner.py",
    }


def test_missing_file_names_the_one_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    text = missing_file("prompts.path", tmp_path / "configs" / "data" / "rows.jsonl")
    assert text == (
        f"prompts.path: {tmp_path}/configs/data/rows.jsonl does not exist; data/rows.jsonl is in the working "
        "directory, but paths in a configuration file are relative to that file"
    )
    assert missing_file("prompts.path", Path("/nowhere.jsonl")) == "prompts.path: /nowhere.jsonl does not exist"


def test_with_absolute_paths_keeps_empty_paths() -> None:
    assert not list(files_read(with_absolute_paths(parse_config({}, "my.toml"))))
