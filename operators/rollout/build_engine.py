"""The transformers backend. The model code is imported here and in the engine's own files alone."""

from __future__ import annotations

from pathlib import Path

import torch

from infra.models.checkpoint_folder import load_model, load_tokenizer
from infra.store.weight_store import WeightStore
from operators.rollout.config import RolloutConfig
from operators.rollout.engine import Engine
from operators.rollout.transformers_engine import TransformersEngine
from schemas.records import WeightVersion


class TransformersBackend:
    """Engines over the architecture of the model folder `model`, without a version yet; weights come from `store`."""

    def __init__(self, config: RolloutConfig, model: Path, store: Path) -> None:
        self._config, self._model = config, model
        self._tokenizer = load_tokenizer(model)
        self.weights = WeightStore(store)
        torch.set_num_threads(config.threads)

    def engine(self) -> Engine:
        return TransformersEngine(
            load_model(self._model, getattr(torch, self._config.dtype)),
            slots=self._config.slots,
            context=self._config.context,
            kv_capacity=self._config.kv_capacity,
        )

    def decode(self, token_ids: list[int]) -> str:
        """The text of `token_ids`, special tokens left out."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def hear(self, manifest: WeightVersion) -> None:
        """The store knows by itself which versions are complete."""

    def close(self) -> None:
        self.weights.close()
