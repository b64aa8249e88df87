"""agents and gateway: assignments and ends of episodes in, dead letters out; what they do else is outside the graph."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from record_factories import prompt, trajectory
from role_graph import RoleGraph

from infra.models.demo import build_demo_tokenizer
from operators.io.episode_keys import ADDRESS_FILE
from pipelines.config import Config, ModelConfig
from schemas.records import AGENT, Assignment, Cancel
from schemas.topics import DEAD_LETTERS, INBOX, METRICS, TRAJECTORIES

Graph = Callable[..., RoleGraph]
EPISODE = prompt(3, 1, environment=AGENT)
RECORDS = [
    (INBOX, Assignment(EPISODE, 0, 1, 1, 0, 1, None, None, 0)),
    (TRAJECTORIES, trajectory(EPISODE, 0)),
    (INBOX, Cancel(("p1.0",), (), 0, 1)),
]


@pytest.fixture
def config(emulated: Config, tmp_path: Path) -> Config:
    build_demo_tokenizer(()).save_pretrained(tmp_path / "model")
    emulated.run_folder.mkdir(exist_ok=True)
    return replace(emulated, model=ModelConfig(str(tmp_path / "model")))


def rejected(graph: RoleGraph, step: str) -> list[str]:
    outputs = [each for each in graph.fold(step, RECORDS) if each.topic is not METRICS]
    assert all(each.topic is DEAD_LETTERS for each in outputs)
    return [each.record.reason for each in outputs]


def test_run_agents_rejects_an_invalid_command(graph: Graph, config: Config) -> None:
    assert rejected(graph("agents", config), "run agents") == ["1 trajectories with 0 leases"]


def test_serve_agents_writes_its_address_and_rejects_an_invalid_command(graph: Graph, config: Config) -> None:
    assert rejected(graph("gateway", config), "serve agents") == ["1 trajectories with 0 leases"]
    assert json.loads((config.run_folder / ADDRESS_FILE).read_text())["url"].startswith("http://127.0.0.1:")
