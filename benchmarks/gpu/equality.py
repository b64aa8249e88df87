"""Whether the GPU computes what the CPU does: the tokens of the engine, and the gradients of the learner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.engine_sides import completions
from benchmarks.gpu.batches import batch_of
from benchmarks.gpu.device import make_model
from benchmarks.gpu.engine import requests
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.learner import learner_config
from benchmarks.gpu.settings import TINY, Settings
from infra.models.checkpoint_folder import load_model
from operators.rollout.engine import Completion
from operators.rollout.transformers_engine import TransformersEngine
from operators.trainer.config import Precision
from operators.trainer.learner import Learner

REQUESTS, TOKENS = 24, 32


def equality(settings: Settings, model: Path) -> list[Figure]:
    """Bounds of the differences, on a tiny model in float32, and of bfloat16 gradients from float32 ones."""
    small = replace(settings, shape=TINY, device="cpu", micro_batch_tokens=512)
    folder = model.with_name("tiny")
    make_model(small, folder)
    expected = _generate(folder, "cpu", fixed=False)
    figures = []
    ways: dict[str, dict[str, Any]] = {
        "": {"fixed": False},
        ", graphs": {"fixed": True},
        ", 3 slots": {"fixed": True, "slots": 3},
        ", speculation": {"fixed": True, "speculation": True},
    }
    for name, options in ways.items():
        found = _generate(folder, settings.device, **options)
        same, worst = compare(expected, found)
        figures += [
            Figure(f"equal tokens{name}", same, "", (">=", 0.99)),
            Figure(f"largest difference of logprobs{name}", worst, "nats", ("<=", 1e-3)),
        ]
    gradients = _gradients(small, folder, "cpu", "float32")
    for precision, bound in (("float32", 1e-3), ("bfloat16", 5e-2)):
        other = _gradients(small, folder, settings.device, precision)  # type: ignore[arg-type]
        difference = _relative(gradients, other)
        figures.append(Figure(f"difference of gradients, {precision}", difference, "", ("<=", bound)))
    return figures


def _generate(folder: Path, device: str, *, slots: int = 8, **options: Any) -> dict[str, Completion]:
    engine = TransformersEngine(load_model(folder).to(device), slots=slots, context=128, **options)
    return completions(engine, requests(REQUESTS, TOKENS, 0))


def compare(expected: Mapping[str, Completion], found: Mapping[str, Completion]) -> tuple[float, float]:
    """The share of tokens before the first difference of each response, and their largest difference in logprob."""
    same, worst = 0, 0.0
    for name, completion in expected.items():
        own, other = completion.generated, found[name].generated
        differs = np.flatnonzero(own.token_ids != other.token_ids)
        until = int(differs[0]) if len(differs) else len(own.token_ids)
        same += until
        if until:
            worst = max(worst, float(np.abs(own.logprobs[:until] - other.logprobs[:until]).max()))
    return same / (len(expected) * TOKENS), worst


def _gradients(settings: Settings, folder: Path, device: str, precision: Precision) -> list[Tensor]:
    learner = Learner(learner_config(settings, precision), folder, device)
    found: list[Tensor] = []
    # Before each step; afterwards the gradients are cleared.
    learner.before_change = lambda: found.extend(p.grad.cpu() for p in learner.model.parameters() if p.grad is not None)
    learner.update([batch_of(8, 64, int(TINY.config["vocab_size"]))])
    return found


def _relative(expected: list[Tensor], found: list[Tensor]) -> float:
    """The 2-norm of the difference over that of `expected`, over all tensors."""
    pairs = list(zip(expected, found, strict=True))
    difference = sum(float((a - b).double().square().sum()) for a, b in pairs)
    return float((difference / sum(float(a.double().square().sum()) for a, _ in pairs)) ** 0.5)
