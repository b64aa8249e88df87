"""A small cluster to predict: four replicas, batches of 32 trajectories, lengths of about 200 tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines.cli.predict import PredictionOptions
from pipelines.config import Config, parse_config
from pipelines.simulate.prediction.cluster import Cluster

TABLE: dict[str, dict[str, Any]] = {
    "run": {"name": "predicted"},
    "prompts": {"source": "synthetic", "prompt_tokens": 16, "max_new_tokens": 1000, "samples_per_prompt": 4},
    "rollout": {
        "engine": "emulated",
        "replicas": 4,
        "slots": 16,
        "context": 1024,
        "kv_capacity": 4096,
        "emulation": {"lengths": {"p50": 200, "p99": 1000}},
    },
    "placement": {"max_replicas": 16},
    "score": {"answer": "whole", "rewards": [{"name": "length", "options": {"target": 100, "limit": 1500}}]},
    "experience": {"global_batch": 32},
    "trainer": {"optimizer_steps": 6, "emulation": {"step_s": [[0, 1.0], [1e4, 4.0]], "stall_s": 0.1}},
}


def small_config(**changes: Any) -> Config:
    """The configuration; `changes` are by "section__key"."""
    table = {name: dict(section) for name, section in TABLE.items()}
    for name, value in changes.items():
        section, key = name.split("__")
        table.setdefault(section, {})[key] = value
    return parse_config(table, "a test")


def small_cluster(**changes: Any) -> Cluster:
    """The cluster of `small_config`: 4 GPUs train, each replica has one."""
    return Cluster(small_config(**changes), train_gpus=4)


def with_schedule(schedule: str) -> Cluster:
    """The cluster under another schedule."""
    cluster = small_cluster(placement__schedule=schedule, placement__max_replicas=16)
    return replace(cluster, training_parts=4 if schedule == "stream" else 1)


def question(file: Path | None = None, run: Path | None = None, **changes: object) -> PredictionOptions:
    """A question about the cluster of `file`, or of `run`."""
    plain = PredictionOptions(file, run, [], 4, 1, "", 0.0, 0.0)
    return replace(plain, **changes)  # type: ignore[arg-type]
