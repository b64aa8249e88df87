"""The graphs of roles on a real broker, of one emulated run whose topics exist."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from infra.kafka.broker import Broker

if TYPE_CHECKING:
    from role_graph import RoleGraph

    from pipelines.config import Config


@pytest.fixture(scope="session")
def emulated(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Config:
    from dataclasses import replace

    from infra.files import create_secret
    from pipelines.config import KafkaConfig, RunConfig, parse_config
    from pipelines.run.topics import make_topics

    store = tmp_path_factory.mktemp("store")
    create_secret(store / "token")
    settings = {
        "rollout": {"engine": "emulated"},
        "prompts": {"source": "synthetic"},
        "experience": {"global_batch": 2},
        "relay": {"store": str(store), "token_file": str(store / "token")},
    }
    run = RunConfig("steps", folder=store, time_scale=1e6)
    kafka = KafkaConfig(broker.bootstrap_servers, replication_factor=1)
    config = replace(parse_config(settings, "a test"), run=run, kafka=kafka)
    make_topics(config)
    return config


@pytest.fixture
def graph(emulated: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RoleGraph]:
    """`graph(role)` is the graph that `pipelines/<role>.py` builds for the emulated run."""
    from importlib import import_module

    from role_graph import RoleGraph

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # TestPipeline leaves folders

    def of(role: str, *arguments: Any) -> RoleGraph:
        build = import_module(f"pipelines.{role}").build
        return RoleGraph(lambda pipeline: build(pipeline, *(arguments or (emulated,))))

    return of
