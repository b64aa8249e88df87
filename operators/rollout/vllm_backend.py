"""The vLLM backend: engines over the model folder, weights from this machine's store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from infra.gpus import visible_gpus
from infra.models.sizes import context_length
from operators.rollout.config import RolloutConfig
from operators.rollout.engine import Engine
from operators.rollout.model_backend import ModelBackend
from operators.rollout.vllm_engine import VllmEngine, open_vllm


class VllmBackend(ModelBackend):
    """Engines over the model folder, without a version yet, on the GPUs of process `process`, or on the CPU where there
    are none; weights come from the store. Raises ValueError where there are too few GPUs."""

    def __init__(self, config: RolloutConfig, model: Path, store: Path, process: int) -> None:
        gpus = config.gpus_of(process, visible_gpus())
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)  # nothing in this process has used one yet
        else:
            torch.set_num_threads(config.threads)
        super().__init__(config, model, store)

    def engine(self) -> Engine:
        config = self.config
        options: dict[str, Any] = dict(config.vllm)
        vllm = open_vllm(
            self.model,
            slots=config.slots,
            context=config.context or context_length(self.model),
            kv_capacity=config.kv_capacity,
            dtype=config.dtype,
            gpus=config.gpus,
            **options,
        )
        return VllmEngine(vllm)
