"""After a lost session, a rollout's engines and their weights are freed before the next start makes others."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from record_factories import prompt, shard, version
from trainer_batches import save_tiny_model

from infra.models.checkpoint_folder import load_model, load_tokenizer
from infra.models.weights import save_weights
from infra.store.weight_store import WeightStore
from infra.transport.endpoint import Endpoint
from operators.io.elements import Polled, ReceivedRecord, Restored
from operators.io.fold_records import _FoldFn, close_folds
from operators.rollout import generate_trajectories
from operators.rollout.backend import TransformersSpec
from operators.rollout.config import RolloutConfig
from operators.rollout.generate_trajectories import GenerateTrajectories
from operators.rollout.model_backend import TransformersBackend
from operators.rollout.transformers_engine import TransformersEngine
from schemas.columns import token_ids
from schemas.records import Assignment, Sampling

TEXT = "1 + 1 ="


class Producer:
    """A Kafka producer that writes nothing."""

    def __init__(self, client: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


class Watched:
    """Counts the engines that are alive when another one is made, and the bytes of all tensors."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self.engines: list[weakref.ref[TransformersEngine]] = []
        self.alive: list[int] = []
        self.tensor_bytes: list[int] = []

    def make(self, backend: TransformersBackend, device: torch.device, slots: int) -> TransformersEngine:
        self.alive.append(sum(each() is not None for each in self.engines))
        self.tensor_bytes.append(tensor_bytes())
        made: TransformersEngine = self._make(backend, device, slots)
        self.engines.append(weakref.ref(made))
        return made


def tensor_bytes() -> int:
    """The bytes of all tensors of this process: weights, KV, buffers."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return sum({(each := one.untyped_storage()).data_ptr(): each.nbytes() for one in tensors}.values())


@pytest.fixture
def rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GenerateTrajectories]:
    """One replica of a tiny model, with a weight version in its store."""
    monkeypatch.setattr(generate_trajectories, "BoundedProducer", Producer)
    model, file = save_tiny_model(tmp_path / "model"), tmp_path / "weights"
    save_weights(load_model(model), file)
    with WeightStore(tmp_path / "store") as store, store.begin(version(1), file.stat().st_size) as arriving:
        with file.open("rb") as content:
            assert content.readinto(arriving.view) == arriving.size
        arriving.seal()
    config = RolloutConfig(slots=64, step_s=0)
    spec = TransformersSpec(config, model, tmp_path / "store")
    yield GenerateTrajectories(config, shard("rollout"), spec, 0, Endpoint(token="a-token-of-the-tests"))
    close_folds()


def test_engine_is_freed_before_the_next_start(rollout: GenerateTrajectories, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(TransformersBackend._engine)
    monkeypatch.setattr(TransformersBackend, "_engine", lambda *args: watched.make(*args))
    tokens = token_ids(load_tokenizer(rollout.backend.model).encode(TEXT))  # type: ignore[attr-defined]
    asked = prompt(0, 1, text=TEXT, token_ids=tokens, sampling=Sampling(1.0, 1.0, 0, 40, (), 3))
    fold, suspended = _FoldFn(rollout), []
    gc.collect()
    for start in (1, 2, 3):
        list(fold.process(Restored("g", start, (), {"versions": [str(version(1))]}, {})))
        assignment = Assignment(asked, 0, start, start, 0, start, None, None, 0)
        emissions = fold.process(Polled("g", start, (ReceivedRecord("inbox", 0, start, assignment),), (), {}, True))
        suspended.append((next(emissions), emissions))  # the session is lost while an emission is on its way
        engine = watched.engines[-1]()
        assert engine is not None
        assert (engine.version, engine.status().running) == (version(1), 1)
        held = tensor_bytes() - watched.tensor_bytes[0]
        del engine
    assert watched.alive == [0, 0, 0]
    assert held > 100_000
    assert max(watched.tensor_bytes) < watched.tensor_bytes[0] + held // 10
