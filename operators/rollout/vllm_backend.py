"""The vLLM backend: engines over the model folder, weights from this machine's store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infra.models.checkpoint_folder import load_tokenizer
from infra.models.context import context_length
from infra.store.weight_store import WeightStore
from operators.rollout.config import RolloutConfig
from operators.rollout.engine import Engine
from operators.rollout.vllm_engine import VllmEngine, open_vllm
from schemas.records import WeightVersion


class VllmBackend:
    """Engines over the model folder `model`, without a version yet; weights come from `store`."""

    def __init__(self, config: RolloutConfig, model: Path, store: Path) -> None:
        self._config, self._model = config, model
        self._tokenizer = load_tokenizer(model)
        self.weights = WeightStore(store)

    def engine(self) -> Engine:
        config = self._config
        options: dict[str, Any] = dict(config.vllm)
        context = config.context or context_length(self._model)
        vllm = open_vllm(
            self._model,
            slots=config.slots,
            context=context,
            kv_capacity=config.kv_capacity,
            dtype=config.dtype,
            gpus=config.gpus,
            **options,
        )
        return VllmEngine(vllm)

    def decode(self, token_ids: list[int]) -> str:
        """The text of `token_ids`, special tokens left out."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def hear(self, manifest: WeightVersion) -> None:
        """The store knows by itself which versions are complete."""

    def close(self) -> None:
        self.weights.close()
