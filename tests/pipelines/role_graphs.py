"""The graphs of all roles, built with all optional inputs and not run."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from apache_beam.pipeline import AppliedPTransform
from unrun_pipelines import unrun_pipeline

from pipelines import trainer
from pipelines.config import Config, KafkaConfig, RunConfig, parse_config

RUN = "first"


class _NoWork:
    """Replaces the trainer's step, which needs a model."""

    def restore(self, restored: Any) -> Any:
        raise NotImplementedError


def config_of_graphs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A run with several shards of the buffer; its store is `folder`."""
    # Without a model folder: the trainer's step is replaced, and rollouts are emulated.
    monkeypatch.setattr(trainer, "training_step", lambda config, source, rank: (_NoWork(), source))
    settings = {
        "rollout": {"engine": "emulated"},
        "prompts": {"source": "synthetic"},
        "experience": {"shards": 2},
        "relay": {"store": str(folder)},
        "kafka": {"partitions": 2},
    }
    found = parse_config(settings, "a test")
    return replace(found, run=RunConfig(RUN), kafka=KafkaConfig("localhost:1", partitions=2))


def with_all_inputs(config: Config, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the graph of `role` have its optional inputs, too: a curriculum, and the chain of relays."""
    levels = {"": 3}
    monkeypatch.setattr(type(config.prompts), "curricula", property(lambda self: levels))
    if role == "trainer":
        monkeypatch.setattr(Config, "emulated", property(lambda self: False))


def parts_of(config: Config, role: str) -> Sequence[AppliedPTransform]:
    """The steps of the graph of `role`."""
    pipeline = unrun_pipeline()
    importlib.import_module(f"pipelines.{role}").build(pipeline, config=config)
    return pipeline.transforms_stack[0].parts
