"""The model backend rejects prompts of another tokenizer, and opens engines as configured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from record_factories import prompt, version
from scripted_engine import ScriptedEngine, ScriptedWeights

from infra.models.checkpoint_folder import load_model, save_folder
from infra.models.config_files import read_config_files, write_without_weights
from infra.models.demo import build_demo_model, build_demo_tokenizer
from infra.models.demo_config import PHRASES, DemoModelConfig
from infra.models.weights import weight_tensors
from operators.rollout.config import RolloutConfig
from operators.rollout.engine import CannotGenerate
from operators.rollout.model_backend import ModelBackend, TransformersBackend
from operators.rollout.replica import Replica
from operators.rollout.replica_memory import ReplicaMemory
from operators.rollout.transformers_engine import TransformersEngine
from schemas.columns import token_ids
from schemas.records import Assignment, AssignmentRejected, Prompt, Trajectory

QUESTION = "State the final answer to the following arithmetic problem: 4 - 1 ="


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> ModelBackend:
    folder = tmp_path_factory.mktemp("model")
    build_demo_tokenizer(PHRASES["chain_sum"]).save_pretrained(folder)
    return ModelBackend(RolloutConfig(), folder, folder / "store")


def made(number: int, task: str) -> Prompt:
    """A prompt encoded with the tokenizer of the demonstration's `task`."""
    tokens = build_demo_tokenizer(PHRASES[task]).encode(QUESTION)
    return prompt(number, 2, text=QUESTION, token_ids=token_ids(tokens))


def test_prompts_of_another_tokenizer_are_rejected(backend: ModelBackend) -> None:
    weights = ScriptedWeights()
    engine = ScriptedEngine(steps=lambda name: 1)
    replica = Replica(0, 7, engine, weights, str, lambda: 42, check=backend.check)
    weights.add(version(0))
    replica.announce(version(0))
    for number, task in enumerate(("chain_sum", "gcd")):
        for member in range(2):
            replica.accept(Assignment(made(number, task), member, 1, 1, 0, 7, None, None, 0))
    events = [event for _ in range(9) for event in replica.step()]
    refused = {event.trajectory_id: event for event in events if isinstance(event, AssignmentRejected)}
    assert {event.trajectory_id for event in events if isinstance(event, Trajectory)} == {"p0.0", "p0.1"}
    assert refused.keys() == {"p1.0", "p1.1"}
    for event in refused.values():
        assert not event.retry
        assert "prompt p1 was encoded with another tokenizer than that of" in event.reason


@pytest.mark.parametrize("speculation", [True, False])
def test_transformers_backend_opens_engines_with_speculation(speculation: bool, tmp_path: Path) -> None:
    small = DemoModelConfig(hidden_size=32, layers=1, heads=2, kv_heads=1, mlp_size=48)
    save_folder(*build_demo_model(small), tmp_path)
    backend = TransformersBackend(RolloutConfig(speculation=speculation, slots=2), tmp_path, tmp_path / "store")
    assert (backend.engine()._speculator is not None) is speculation


def test_transformers_backend_loads_the_model_in_its_dtype(tmp_path: Path) -> None:
    small = DemoModelConfig(hidden_size=32, layers=1, heads=2, kv_heads=1, mlp_size=48)
    save_folder(*build_demo_model(small), tmp_path)
    config = RolloutConfig(slots=2, dtype="bfloat16")
    engine = TransformersBackend(config, tmp_path, tmp_path / "store").engine()
    found, expected = (weight_tensors(model) for model in (engine.model, load_model(tmp_path, torch.bfloat16)))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (RolloutConfig(slots=2, context=1 << 20), "a context of 1048576 tokens exceeds the"),
        (RolloutConfig(slots=2, kv_capacity=8), "a KV capacity of 8 tokens cannot hold one context"),
    ],
)
def test_model_that_no_start_could_run_is_a_permanent_error(config: RolloutConfig, reason: str, tmp_path: Path) -> None:
    save_folder(
        *build_demo_model(DemoModelConfig(hidden_size=32, layers=1, heads=2, kv_heads=1, mlp_size=48)), tmp_path
    )
    backend = TransformersBackend(config, tmp_path, tmp_path / "store")
    with pytest.raises(CannotGenerate, match=rf"cannot run the model in .* \(model\.path\): {reason}"):
        backend.engine()


def test_backend_without_weight_files_loads_its_first_version(tmp_path: Path) -> None:
    small = DemoModelConfig(hidden_size=32, layers=1, heads=2, kv_heads=1, mlp_size=48)
    whole, folder = tmp_path / "whole", tmp_path / "without"
    save_folder(*build_demo_model(small), whole)
    write_without_weights(folder, read_config_files(whole))
    memories = [ReplicaMemory.of(each, "float32") for each in (whole, folder)]
    assert memories[0] == memories[1]
    backend = TransformersBackend(RolloutConfig(slots=2, context=32), folder, tmp_path / "store")
    engine = backend.engine()
    assert engine.version is None
    engine.load(whole / "model.safetensors", version(3))
    assert isinstance(engine, TransformersEngine)
    assert engine.direct
    expected = weight_tensors(load_model(whole))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weight_tensors(engine.model).items())
