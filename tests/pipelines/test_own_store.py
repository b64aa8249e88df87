"""The weight store of a run that one command starts: its folder has a hash of the run's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.config import Config, parse_config
from pipelines.shards import own_store_folder, store_folder


def config_of(name: str, **relay: str) -> Config:
    return parse_config({"run": {"name": name}, "prompts": {"task": "gcd"}, "relay": relay}, "test")


def test_runs_of_one_name_in_two_folders_have_two_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user must not have to know the names of all runs on the machine."""
    config, stores = config_of("first"), []
    for folder in ("mine", "yours", "mine"):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        stores.append(own_store_folder(config))
    assert stores[0] == stores[2] != stores[1]
    assert all(store.name.startswith("laminar-first-") for store in stores)
    assert store_folder(config) not in stores


def test_own_store_is_the_configured_one(tmp_path: Path) -> None:
    assert own_store_folder(config_of("first", store=str(tmp_path))) == tmp_path


def test_own_store_exists_for_the_longest_name() -> None:
    assert len(own_store_folder(config_of("x" * 100)).name) < 100
