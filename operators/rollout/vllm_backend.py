"""The vLLM backend: engines over the model folder, with weights from this machine's store."""

from __future__ import annotations

from typing import Any

from infra.models.sizes import context_length
from operators.rollout.engine import Engine
from operators.rollout.model_backend import ModelBackend
from operators.rollout.vllm_engine import VllmEngine, open_vllm


class VllmBackend(ModelBackend):
    """Engines over the model folder, with no weight version loaded."""

    def engine(self) -> Engine:
        config = self.config
        options: dict[str, Any] = dict(config.vllm)
        vllm = open_vllm(
            self.model,
            slots=config.most_slots,
            context=config.context or context_length(self.model),
            kv_capacity=config.kv_capacity,
            dtype=config.weights_dtype,
            gpus=config.tensor_parallel,
            **options,
        )
        return VllmEngine(vllm)
