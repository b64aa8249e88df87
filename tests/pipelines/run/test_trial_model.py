"""The trial builds the model of a run, to find what the learner would refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra.models.checkpoint_folder import save_folder
from infra.models.demo import build_demo_model
from infra.models.demo_config import DemoModelConfig
from pipelines.config import parse_config
from pipelines.run.trial import try_config


@pytest.mark.parametrize(
    ("learner", "reason"),
    [
        ({}, None),
        ({"lora": {"rank": 2, "targets": ["q_porj"]}}, "lora.targets: no layer is called 'q_porj'"),
        ({"parameter_groups": [{"match": "nrom"}]}, "parameter_groups: match = 'nrom' matches no"),
        ({"parameter_groups": [{"match": "nrom"}], "name": "own.py:open"}, None),  # it has its own limits
        ({"name": "own.py:opne"}, "name: "),
        ({"name": "none.py:Own"}, "name: there is no file"),
    ],
)
def test_trial_names_what_the_learner_would_refuse(tmp_path: Path, learner: dict[str, Any], reason: str | None) -> None:
    (tmp_path / "own.py").write_text("def open(config, model, device, ranks): ...")
    if ":" in learner.get("name", ""):
        learner = {**learner, "name": f"{tmp_path}/{learner['name']}"}
    model, tokenizer = build_demo_model(DemoModelConfig(layers=1))
    save_folder(model, tokenizer, tmp_path / "model")
    table = {"run": {"name": "trial"}, "prompts": {"task": "gcd"}, "model": {"path": str(tmp_path / "model")}}
    found = try_config(parse_config({**table, "trainer": {"learner": learner}}, "test"), roles=["trainer"])
    assert len(found.problems) == (reason is not None)
    assert all(each.startswith(f"trainer.learner.{reason}") for each in found.problems)
