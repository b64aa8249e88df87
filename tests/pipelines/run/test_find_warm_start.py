"""A run finds the warm start of an earlier run with the same settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.models.demo_config import DemoModelConfig
from operators.trainer.warm_start_config import WarmStartConfig
from operators.trainer.warm_start_record import RECORD_FILE
from pipelines.config import Config, RunConfig
from pipelines.run.warm_start import PROGRESS_FILE, find_warm_start, make_warm_start, warm_start_questions

TINY = WarmStartConfig(
    model=DemoModelConfig(hidden_size=16, layers=1, heads=2, kv_heads=1, mlp_size=16, max_positions=64),
    examples=16, steps=1, batch=2, measured=2, max_new_tokens=2,
)  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = Config(run=RunConfig(name="first", folder=tmp_path), warm_start=TINY)
    return replace(config, prompts=replace(config.prompts, task="chain_sum", heldout=4))


def test_find_warm_start_finds_it_without_drawing_questions(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_warm_start(config) is None
    config.run_folder.mkdir()
    make_warm_start(config)
    progress = json.loads((config.run_folder / PROGRESS_FILE).read_text())
    monkeypatch.setattr("pipelines.run.warm_start.open_source", None)
    another = replace(config, run=replace(config.run, name="second"))
    assert find_warm_start(another) == {**progress, "seconds": 0.0}
    for changed in (
        replace(config, warm_start=replace(TINY, seed=1)),
        replace(config, prompts=replace(config.prompts, heldout=3)),
    ):
        assert find_warm_start(changed) is None
    (Path(progress["folder"]) / RECORD_FILE).write_text("{}")
    assert find_warm_start(config) is None  # a damaged one is not used


def test_warm_start_questions_are_of_the_first_level(config: Config) -> None:
    long, short = {"min_terms": 6, "max_terms": 6}, {"min_terms": 2, "max_terms": 3}
    prompts = replace(config.prompts, task_args=long, levels=(short, {}))
    entries, heldout = warm_start_questions(replace(config, prompts=prompts))

    def terms(found: list[Mapping[str, Any]]) -> set[int]:
        return {len(entry["metadata"]["expression"].split()) // 2 + 1 for entry in found}

    assert (len(entries), len(heldout)) == (TINY.examples, TINY.measured)
    assert terms(entries) == {2, 3}
    assert terms(heldout) == {6}, "held-out questions follow task_args alone"
