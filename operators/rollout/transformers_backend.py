"""The transformers backend. The model code is imported here and in the engine's own files alone."""

from __future__ import annotations

from pathlib import Path

import torch

from infra.models.checkpoint_folder import load_model
from operators.rollout.config import RolloutConfig
from operators.rollout.engine import Engine
from operators.rollout.model_backend import ModelBackend
from operators.rollout.transformers_engine import TransformersEngine


class TransformersBackend(ModelBackend):
    """Engines over the architecture of the model folder, without a version yet; weights come from the store."""

    def __init__(self, config: RolloutConfig, model: Path, store: Path) -> None:
        super().__init__(config, model, store)
        torch.set_num_threads(config.threads)

    def engine(self) -> Engine:
        return TransformersEngine(
            load_model(self.model, getattr(torch, self.config.dtype)),
            slots=self.config.slots,
            context=self.config.context,
            kv_capacity=self.config.kv_capacity,
        )
