"""Slices of packed tokens, and the models that context parallelism can divide."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from operators.trainer.context_parallel import WHOLE, ContextGroup, ContextSlice, check_heads
from operators.trainer.packing import PackedTokens, pack_tokens
from operators.trainer.training_config import TrainingConfig

IDS = np.arange(10, 20)
MASK = np.array([0, 1, 1, 0, 0, 1, 0, 1, 1, 1], bool)
PACKED = pack_tokens(IDS, MASK, np.array([3, 7]), torch.device("cpu"), np.array([1.0, 0.5], np.float32))


def slices(count: int) -> list[PackedTokens]:
    """The slice of each of `count` ranks."""
    return [PACKED.slice_for(ContextGroup(rank, count)) for rank in range(count)]


@pytest.mark.parametrize("count", [2, 3, 4, 8, 11])
def test_slices_have_each_token_and_predictor_once(count: int) -> None:
    parts = slices(count)
    total = PACKED.token_ids.shape[1]
    length = -(-total // count)
    assert {part.token_ids.shape for part in parts} == {part.layout.positions.shape for part in parts} == {(1, length)}
    for name in ("token_ids", "positions"):
        found = torch.cat([getattr(part if name == "token_ids" else part.layout, name) for part in parts], 1)
        whole = PACKED.token_ids if name == "token_ids" else PACKED.layout.positions
        assert torch.equal(found[:, :total], whole)
        assert not found[:, total:].any()
    predictors = torch.cat([part.predictors + rank * length for rank, part in enumerate(parts)])
    assert torch.equal(predictors, PACKED.predictors)
    for name in ("targets", "temperatures"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(PACKED, name))
    assert all(0 <= int(place) < length for part in parts for place in part.predictors)
    assert {part.counts.counts for part in parts if part.counts} == {tuple(len(part.targets) for part in parts)}


def test_slice_of_a_single_rank_is_the_whole() -> None:
    assert PACKED.slice_for(WHOLE) is PACKED


def test_slice_of_the_output_has_the_heads_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ContextSlice, "_exchange", lambda own, parts: parts)
    assert ContextSlice(ContextGroup(0, 2), 5).to_tokens(torch.zeros(5, 2, 7)).shape == (3, 4, 7)


@pytest.mark.parametrize(("heads", "of_keys", "count"), [(8, 8, 4), (8, 2, 2), (8, 2, 8), (28, 4, 2), (4, None, 4)])
def test_heads_that_ranks_can_divide_are_accepted(heads: int, of_keys: int | None, count: int) -> None:
    check_heads(SimpleNamespace(num_attention_heads=heads, num_key_value_heads=of_keys), count)


@pytest.mark.parametrize(("heads", "of_keys", "count"), [(6, 6, 4), (12, 4, 6), (2, 1, 4)])
def test_heads_that_ranks_cannot_divide_are_rejected(heads: int, of_keys: int, count: int) -> None:
    shape = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=of_keys)
    said = f"context_ranks is {count}, but the model has {heads} attention heads and {of_keys} key-value heads"
    with pytest.raises(ValueError, match=re.escape(said)):
        check_heads(shape, count)


@pytest.mark.parametrize(("context", "needed"), [(0, "be at least 1"), (3, r"divide ranks \(4\)")])
def test_context_ranks_must_divide_ranks(context: int, needed: str) -> None:
    with pytest.raises(ValueError, match=rf"context_ranks must {needed}, not {context}"):
        TrainingConfig(ranks=4, context_ranks=context)
