"""Micro-batches: their plan, packed attention against the model's own, gradients independent of the split."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from trainer_batches import make_batch, save_tiny_model

from infra.models.checkpoint_folder import load_model
from operators.trainer import packed_attention
from operators.trainer.batch import join_parts
from operators.trainer.packed_attention import lay_out
from operators.trainer.packing import micro_batches, pack, pack_tokens, plan_micro_batches
from operators.trainer.policy import load_policy, token_logprobs
from schemas import columns

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("lengths", "rows", "budget", "plan"),
    [
        ([3, 9, 4, 1], [0, 1, 2, 3], 9, [[1], [2, 0, 3]]),
        ([3, 9, 4, 1], [0, 1, 2, 3], 8, [[1], [2, 0, 3]]),
        ([3, 9, 4, 1], [0, 1, 2, 3], 7, [[1], [2, 0], [3]]),
        ([3, 9, 4, 1], [0, 2, 3], 7, [[2, 0], [3]]),
        ([5, 5, 5], [0, 1, 2], 100, [[0, 1, 2]]),
        ([5, 5, 5], [0, 1, 2], 1, [[0], [1], [2]]),
        ([5], [], 10, []),
    ],
)
def test_plan_micro_batches(lengths: list[int], rows: list[int], budget: int, plan: list[list[int]]) -> None:
    found = plan_micro_batches(np.array(lengths), np.array(rows, np.int64), budget)
    assert [part.tolist() for part in found] == plan


def test_packed_logprobs_match_single_sequences(tmp_path: Path) -> None:
    batch = join_parts(make_batch(parts=2))
    folder = save_tiny_model(tmp_path)
    plain, policy = load_model(folder), load_policy(folder, CPU).model
    rows = np.array([7, 0, 3, 12])
    part = pack(batch, rows, CPU)
    found, entropies = token_logprobs(policy, part.packed, 1000, with_entropy=True)
    expected, expected_entropies, behaviour, segments = [], [], [], []
    for segment, row in enumerate(rows):
        tokens = slice(batch.starts[row], batch.starts[row] + batch.lengths[row])
        ids, mask = torch.from_numpy(batch.token_ids[tokens]), torch.from_numpy(batch.loss_mask[tokens])
        logprobs = (plain(input_ids=ids[None]).logits[0] / float(batch.temperatures[row])).log_softmax(-1)
        expected.append(logprobs[:-1].gather(1, ids[1:, None])[:, 0][mask[1:]])
        expected_entropies.append(torch.distributions.Categorical(logits=logprobs[:-1][mask[1:]]).entropy())
        behaviour += batch.behaviour[tokens][batch.loss_mask[tokens]].tolist()
        segments += [segment] * int(mask.sum())
    assert entropies is not None
    torch.testing.assert_close(found, torch.cat(expected), atol=2e-5, rtol=0)
    torch.testing.assert_close(entropies, torch.cat(expected_entropies), atol=2e-5, rtol=0)
    assert part.behaviour.tolist() == behaviour
    assert part.segments.tolist() == segments


def test_attention_takes_keywords_that_request_nothing() -> None:
    tensors = torch.randn(3, 1, 2, 5, 4)

    def attend(**keywords: Any) -> torch.Tensor:
        packed = lay_out(np.array([3, 2]), CPU)
        return packed_attention.packed_attention(torch.nn.Module(), *tensors, None, packed=packed, **keywords)[0]

    neutral = {"is_causal": True, "dropout": 0.0, "position_ids": torch.arange(5), "output_attentions": False}
    assert torch.equal(attend(**neutral), attend())
    for name, value in (("is_causal", False), ("dropout", 0.1), ("output_attentions", True)):
        with pytest.raises(ValueError, match=rf"passes {name} \({value}\) to attention"):
            attend(**{name: value})


@pytest.mark.parametrize(
    ("lengths", "blocks"),
    [
        ([7], ((1, 7),)),
        ([5, 5, 5], ((3, 5),)),
        ([50, 40, 100, 98], ((2, 100), (2, 50))),
        ([300, 20, 280, 299, 30], ((2, 300), (1, 280), (2, 30))),
        ([100, 10], ((1, 100), (1, 10))),
        ([10, 100], ((1, 100), (1, 10))),
    ],
)
def test_layout_groups_sequences_of_similar_length(lengths: list[int], blocks: tuple[tuple[int, int], ...]) -> None:
    layout = lay_out(np.array(lengths), CPU)
    assert layout.blocks == blocks
    places = sum(rows * width for rows, width in blocks)
    stay = places == sum(lengths) and lengths == sorted(lengths, reverse=True)
    assert (layout.to_blocks is None, layout.from_blocks is None) == (stay, stay)
    if layout.to_blocks is None or layout.from_blocks is None:
        return
    assert len(layout.to_blocks) == places
    assert layout.to_blocks[layout.from_blocks].tolist() == list(range(sum(lengths)))


def test_varlen_kernel_matches_attention_and_gradient_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn's kernel needs a GPU: its definition takes its place, with its arguments."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    torch.manual_seed(0)
    lengths = np.array([4, 9, 1, 6])
    inputs = [torch.randn(1, heads, 20, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    layout, outputs = lay_out(lengths, CPU), []
    for kernel in (None, varlen_by_definition):
        monkeypatch.setattr(packed_attention, "varlen_kernel", lambda query, kernel=kernel: kernel)
        output, _ = packed_attention.packed_attention(torch.nn.Identity(), *inputs, None, packed=layout, scaling=0.3)
        gradients = torch.autograd.grad((output * torch.arange(output.numel()).view_as(output)).sum(), inputs)
        outputs.append([output, *gradients])
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other)


def varlen_by_definition(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None,
    causal: bool,
    deterministic: bool,
) -> torch.Tensor:
    """What `flash_attn_varlen_func` computes, one sequence after the other."""
    assert causal
    assert deterministic
    assert cu_seqlens_q.dtype == torch.int32
    assert cu_seqlens_q.tolist() == cu_seqlens_k.tolist() == [0, 4, 13, 14, 20]
    assert max_seqlen_q == max_seqlen_k == 9
    parts = []
    for begin, end in itertools.pairwise(cu_seqlens_q.tolist()):
        own = [each[begin:end].transpose(0, 1) for each in (query, key, value)]
        keys, values = (each.repeat_interleave(len(own[0]) // len(each), 0) for each in own[1:])
        scores = own[0] @ keys.transpose(1, 2) * softmax_scale
        later = torch.ones(end - begin, end - begin, dtype=torch.bool).triu(1)
        parts.append((scores.masked_fill(later, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("kind", "head", "dtype", "autocast", "capability", "chosen"),
    [
        ("cuda", 128, torch.bfloat16, None, (9, 0), True),
        ("cuda", 256, torch.float16, None, (8, 0), True),
        ("cuda", 64, torch.float32, torch.bfloat16, (8, 6), True),  # weights in float32, computed in bfloat16
        ("cuda", 64, torch.float32, None, (9, 0), False),
        ("cuda", 64, torch.bfloat16, torch.float32, (9, 0), False),
        ("cuda", 257, torch.bfloat16, None, (9, 0), False),
        ("cuda", 128, torch.bfloat16, None, (7, 5), False),
        ("cpu", 128, torch.bfloat16, None, (9, 0), False),
    ],
)
def test_varlen_kernel_is_chosen_where_it_can_compute(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    head: int,
    dtype: torch.dtype,
    autocast: torch.dtype | None,
    capability: tuple[int, int],
    chosen: bool,
) -> None:
    kernel = object()
    monkeypatch.setattr(packed_attention, "_installed", lambda: kernel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda" and autocast is not None)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: autocast)
    query: Any = SimpleNamespace(device=torch.device(kind), shape=(1, 4, 9, head), dtype=dtype)
    assert packed_attention.varlen_kernel(query) is (kernel if chosen else None)


@pytest.mark.parametrize("installed", [True, False])
def test_varlen_kernel_needs_its_package(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    module = SimpleNamespace(flash_attn_varlen_func=print) if installed else None
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    assert packed_attention._installed.__wrapped__() is (print if installed else None)


def test_sequences_do_not_attend_to_each_other(tmp_path: Path) -> None:
    policy = load_policy(save_tiny_model(tmp_path), CPU).model
    ids, mask, lengths = np.arange(2, 20), np.tile(np.arange(6) > 1, 3), np.array([6, 6, 6])
    changed = np.r_[ids[:6] + 40, ids[6:12], ids[12:] + 60]
    one, _ = token_logprobs(policy, pack_tokens(ids, mask, lengths, CPU), 1000)
    other, _ = token_logprobs(policy, pack_tokens(changed, mask, lengths, CPU), 1000)
    assert torch.equal(one[4:8], other[4:8])
    assert not torch.isclose(one[:4], other[:4]).any()


def test_contexts_of_a_sequence_do_not_attend_to_each_other(tmp_path: Path) -> None:
    """A trajectory of two conversations has the logprobs of two sequences."""
    policy = load_policy(save_tiny_model(tmp_path), CPU).model
    (row,) = make_batch()
    lengths = row.lengths.to_pylist()
    joined, first = lengths[0] + lengths[1], lengths[0]
    names, both = row.trajectory_ids, {"lengths": [joined, *lengths[2:]]}
    for name in ("prompt_lengths", "staleness", "version_epochs", "version_numbers"):
        both[name] = [each for at, each in enumerate(getattr(row, name).to_pylist()) if at != 1]
    floats = {name: columns.floats(np.delete(getattr(row, name).to_numpy(), 1)) for name in ("rewards", "temperatures")}
    changed = replace(
        row,
        trajectory_ids=(names[0], *names[2:]),
        truncated=columns.flags([each for at, each in enumerate(row.truncated.to_pylist()) if at != 1]),
        breaks=columns.integers([first]),
        **floats,
        **{name: columns.integers(values) for name, values in both.items()},
    )
    batch, together = join_parts([row]), join_parts([changed])
    assert together.contexts.tolist() == [2, *[1] * (len(names) - 2)]
    apart = pack(batch, np.array([0, 1]), CPU)
    one = replace(together, temperatures=np.ones_like(together.temperatures))
    two = replace(batch, temperatures=np.ones_like(batch.temperatures))
    found, _ = token_logprobs(policy, pack(one, np.array([0]), CPU).packed, 1000)
    expected, _ = token_logprobs(policy, pack(two, np.array([0, 1]), CPU).packed, 1000)
    assert len(found) == len(apart.behaviour)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("budget", [1, 40, 130])
def test_gradient_is_independent_of_the_split(tmp_path: Path, budget: int) -> None:
    policy = load_policy(save_tiny_model(tmp_path), CPU).model.double()
    whole, split = (gradient_of(policy, tokens) for tokens in (10**6, budget))
    assert (whole - split).norm() <= 1e-12 * whole.norm()
    assert whole.norm() > 1e-3


def test_split_keeps_accuracy_in_float32(tmp_path: Path) -> None:
    policy = load_policy(save_tiny_model(tmp_path), CPU).model
    whole, split = (gradient_of(policy, tokens) for tokens in (10**6, 60))
    assert (whole - split).norm() <= 1e-5 * whole.norm()


@pytest.mark.parametrize("chunk", [1, 7, 60])
def test_chunked_logits_keep_the_gradient(tmp_path: Path, chunk: int) -> None:
    policy = load_policy(save_tiny_model(tmp_path), CPU).model.double()
    whole, chunked = (gradient_of(policy, 10**6, chunk=tokens) for tokens in (10**6, chunk))
    assert (whole - chunked).norm() <= 1e-12 * whole.norm()


def gradient_of(policy: torch.nn.Module, budget: int, chunk: int = 10**6) -> torch.Tensor:
    """The gradient of Σ coefficient · advantage · logprob over a batch, in micro-batches of `budget` tokens."""
    batch = join_parts(make_batch())
    advantages = torch.linspace(-1, 2, int(batch.trained.sum()))
    coefficients = torch.linspace(0.1, 1, len(batch))
    policy.zero_grad()
    for part in micro_batches(batch, np.arange(len(batch)), budget, CPU):
        logprobs, _ = token_logprobs(policy, part.packed, chunk)  # type: ignore[arg-type]
        torch.autograd.backward((part.select_sequences(coefficients) * part.select_tokens(advantages) * logprobs).sum())
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def test_pack_tokens_omits_the_last_token() -> None:
    mask = np.array([False, True, True, False, False, True])
    packed = pack_tokens(np.arange(10, 16), mask, np.array([3, 1, 2]), CPU)
    assert packed.token_ids.tolist() == [[10, 11, 13, 14]]
    assert (packed.predictors.tolist(), packed.targets.tolist()) == ([0, 1, 3], [11, 12, 15])
    assert packed.layout.positions.tolist() == [[0, 1, 0, 0]]
