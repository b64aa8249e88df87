"""agents and gateway: records of episodes in, dead letters out; what else they do is over HTTP and in processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from record_factories import prompt, trajectory
from role_graph import RoleGraph

from infra.models.checkpoint_folder import save_folder
from infra.models.demo import build_demo_model
from infra.models.demo_config import DemoModelConfig
from schemas.columns import token_ids
from schemas.records import Assignment, TokenRange, TurnRequest
from schemas.topics import DEAD_LETTERS, INBOX, METRICS, TRAJECTORIES

Graph = Callable[..., RoleGraph]
QUESTION = prompt(0, 1, environment="agent")
ASSIGNED = Assignment(QUESTION, 0, 1, 1, 0, 1, None, None, 0)
BEYOND = TurnRequest("p0.0", 1, 0, 1, "t", "d", 0, (TokenRange(0, 5),), token_ids([1]), 8, (), "[]", "[]", False, 0)
POLLS = [[(INBOX, ASSIGNED), (INBOX, BEYOND)], [(TRAJECTORIES, trajectory(QUESTION, 0))]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    save_folder(*build_demo_model(DemoModelConfig(layers=1)), folder)
    return folder


def test_run_agents_rejects_a_turn_beyond_the_recorded_tokens(graph: Graph, tmp_path: Path) -> None:
    outputs = graph("agents").fold("run agents", *POLLS, folder=tmp_path, secret_file=tmp_path / "secret")
    (letter,) = [each.record for each in outputs if each.topic is DEAD_LETTERS]
    assert "its context is not within the 0 tokens before the turn" in letter.reason
    assert len(outputs) == 1


def test_serve_agents_writes_its_address_and_rejects_bad_turns(graph: Graph, model: Path, tmp_path: Path) -> None:
    outputs = graph("gateway").fold("serve agents", *POLLS, model=model, folder=tmp_path)
    letter, metric = outputs
    assert (letter.topic, letter.record.offset) == (DEAD_LETTERS, 1)
    assert (metric.topic, metric.record.name, metric.record.values["episodes"]) == (METRICS, "agents", 1.0)
    address = json.loads((tmp_path / "gateway.json").read_text())
    assert address["url"] == f"http://127.0.0.1:{address['port']}/v1"
    assert (tmp_path / "gateway.secret").stat().st_mode & 0o077 == 0
