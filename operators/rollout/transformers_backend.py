"""The transformers backend. Only this module and those of the engine import model code."""

from __future__ import annotations

import torch

from infra.models.checkpoint_folder import load_model
from operators.rollout.engine import Engine
from operators.rollout.model_backend import ModelBackend
from operators.rollout.transformers_engine import TransformersEngine


class TransformersBackend(ModelBackend):
    """Engines over the model folder's architecture, with no weight version loaded."""

    def engine(self) -> Engine:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return TransformersEngine(
            load_model(self.model, getattr(torch, self.config.weights_dtype)).to(device),
            slots=self.config.slots,
            context=self.config.context,
            kv_capacity=self.config.kv_capacity,
        )
