"""Bit-exact replay with the kernels that a real model takes: an update in bfloat16, repeated from a restored state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu.batches import batch_of
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.learner import learner_config
from benchmarks.gpu.settings import Settings
from infra.models.local_part import local_part
from operators.trainer.learner import Learner


def replay(settings: Settings, model: Path) -> list[Figure]:
    """How many tensors of the state, weights and moments, differ between a learner and one that went on from its state
    after the first of two updates."""
    # Two learners are on the device: their micro-batches are small.
    smaller = replace(settings, micro_batch_tokens=max(settings.length, settings.micro_batch_tokens // 4))
    config = learner_config(smaller, "bfloat16")
    first, resumed = (Learner(config, model, settings.device) for _ in range(2))
    batch = batch_of(settings.sequences, settings.length, int(settings.shape.config["vocab_size"]))
    first.update([batch])
    resumed.restore(first.state())
    before = [local_part(each).elements.clone() for each in resumed.state().weights.values()]
    for learner in (first, resumed):
        learner.update([batch])
    changed = zip(before, resumed.state().weights.values(), strict=True)
    return [
        Figure("differing tensors, restored state", _differing(first, resumed), "", ("<=", 0)),
        Figure("tensors that the update changed", sum(not _same(*each) for each in changed), "", (">=", 1)),
    ]


def _differing(one: Learner, other: Learner) -> int:
    found = other.state().tensors()
    return sum(not _same(each, found[name]) for name, each in one.state().tensors().items())


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors, or parts of sharded ones, have the same elements."""
    return torch.equal(local_part(one).elements, local_part(other).elements)
