"""Engines by name. The model code is imported here and in the engines' own files alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from infra.models.checkpoint_folder import load_model, load_tokenizer
from operators.rollout.config import RolloutConfig
from operators.rollout.engine import Engine
from operators.rollout.transformers_engine import TransformersEngine


def build_engine(config: RolloutConfig, model: Path) -> Engine:
    """The engine that `config` names, over the architecture of the model folder `model`; it has no version yet."""
    torch.set_num_threads(config.threads)
    return TransformersEngine(
        load_model(model, getattr(torch, config.dtype)),
        slots=config.slots,
        context=config.context,
        kv_capacity=config.kv_capacity,
    )


def load_decoder(model: Path) -> Callable[[list[int]], str]:
    """A function from response tokens to text, special tokens left out."""
    tokenizer = load_tokenizer(model)
    return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True))
