"""The process that answers people: a real model from a weight store, under several versions."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from served_process import Served

from infra.models.checkpoint_folder import save_folder
from infra.models.demo import build_demo_model
from infra.models.demo_config import DemoModelConfig
from infra.models.weights import save_weights
from infra.store.weight_store import WeightStore
from pipelines import serve_versions
from pipelines.config import parse_config
from schemas.records import PolicyVersion

CONFIG = """
[run]
name = "served"
folder = "{folder}/runs"
[model]
path = "{folder}/model"
[prompts]
task = "chain_sum"
environment = "agent"
[agents]
command = ["true"]
[[score.rewards]]
name = "environment"
[rollout]
context = 64
[relay]
store = "{folder}/store"
[kafka]
bootstrap_servers = "127.0.0.1:1"
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    model, tokenizer = build_demo_model(DemoModelConfig(layers=1))
    save_folder(model, tokenizer, folder / "model")
    with WeightStore(folder / "store") as store:
        for number in (1, 2):
            file = folder / "weights"
            save_weights(model, file)
            data = file.read_bytes()
            with store.begin(PolicyVersion(1, number), len(data)) as arriving:
                arriving.view[:] = data
                arriving.seal()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
        config = parse_config(tomllib.loads(CONFIG.format(folder=folder)), "config")
        made = Served(config, folder / "work")  # a submitted run has no config.toml
        yield made
        assert made.close() == 0


def test_versions_are_listed_and_give_their_own_responses(served: Served) -> None:
    served.send(id="l", list=True)
    assert served.event() == {"id": "l", "versions": ["1.1", "1.2"]}
    served.ask("a", "latest")
    served.ask("b", "v1")
    (newest, of_newest), (first, of_first) = served.answer("a"), served.answer("b")
    assert (of_newest, of_first) == ("1.2", "1.1")
    assert len(newest) == len(first) == 5
    assert newest != first
    served.ask("c", "v1")
    assert served.answer("c") == (first, "1.1"), "greedy responses are reproduced"


def test_a_response_ends_with_its_stop_string(served: Served) -> None:
    served.ask("s", "v1")
    whole, _ = served.answer("s")
    _, tokenizer = build_demo_model(DemoModelConfig(layers=1))
    stop = tokenizer.decode(whole[:2], skip_special_tokens=True)[-1]
    served.ask("t", "v1", stop)
    cut, _ = served.answer("t")
    assert cut == whole[: len(cut)]
    assert len(cut) <= 2


def test_a_version_that_is_not_there_is_an_error(served: Served) -> None:
    served.ask("d", "newest")
    event = served.event()
    assert event["finish"] == "failed"
    assert "it has 1.1, 1.2" in event["error"]


def test_process_has_a_low_priority_and_few_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def lower(by: int) -> None:
        raise InterruptedError(by)

    monkeypatch.setattr(os, "nice", lower)
    with pytest.raises(InterruptedError, match="5"):  # the process of the other tests has another
        serve_versions.main(tmp_path)
    (tmp_path / "model").mkdir()
    settings = "[gateway]\nserve_threads = 2\nserve_requests = 3\n"
    config = parse_config(tomllib.loads(CONFIG.format(folder=tmp_path) + settings), "config")
    rollout = serve_versions._spec(config).config
    assert (rollout.threads, rollout.slots) == (2, 3)


def test_process_is_the_first_to_be_killed_without_memory(served: Served) -> None:
    served.send(id="l", list=True)
    served.event()  # it has started
    assert Path(f"/proc/{served.pid}/oom_score_adj").read_text() == "1000\n"
