"""Triton kernels of what layers compute by element: a rotary embedding, and the gate of an MLP.

torch's operations read and write the tensors five to ten times for each; on a GPU most of their time, and most of the
launches of a layer, are such operations. The kernels compute in float32 and round once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 8


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """x · cos + (-x₂, x₁) · sin of `query` [1, h, t, d] and `key` [1, h_kv, t, d], whose last dimension has the halves
    x₁ and x₂; `cos` and `sin` are [1, t, d] of any dtype. The results have the dtypes of their sources."""
    rotated: tuple[Tensor, Tensor] = _Rotation.apply(query, key, cos, sin)
    return rotated


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(`gate`) · `up`, of two tensors of one shape and dtype."""
    product: Tensor = _Gate.apply(gate, up)
    return product


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotated(query, key, cos, sin, backward=False)

    @staticmethod
    def backward(ctx: Any, of_query: Tensor, of_key: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return *_rotated(of_query, of_key, *ctx.saved_tensors, backward=True), None, None


def _rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, backward: bool) -> tuple[Tensor, Tensor]:
    query, key, cos, sin = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, cos, sin))
    outputs = torch.empty_like(query), torch.empty_like(key)
    tokens, size = query.shape[2:]
    if tokens:
        strides = [each.stride()[1:3] for each in (query, key, *outputs)]
        _rotation[(tokens,)](
            *(query, key, *outputs, cos, sin),
            *(stride for pair in strides for stride in pair),
            *(cos.stride(1), sin.stride(1)),
            heads=query.shape[1],
            key_heads=key.shape[1],
            half=size // 2,
            block=triton.next_power_of_2(size // 2),
            rows=triton.next_power_of_2(query.shape[1]),
            key_rows=triton.next_power_of_2(key.shape[1]),
            backward=backward,
        )
    return outputs


@triton.jit
def _rotation(  # type: ignore[no-untyped-def]
    query,
    key,
    out_query,
    out_key,
    cos,
    sin,
    query_head,
    query_token,
    key_head,
    key_token,
    out_query_head,
    out_query_token,
    out_key_head,
    out_key_token,
    cos_token,
    sin_token,
    heads: tl.constexpr,
    key_heads: tl.constexpr,
    half: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
    key_rows: tl.constexpr,
    backward: tl.constexpr,
):
    """All heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    first, second = token * cos_token + column, token * sin_token + column
    cos_1 = tl.load(cos + first, mask=column < half, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos + first + half, mask=column < half, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin + second, mask=column < half, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin + second + half, mask=column < half, other=0.0).to(tl.float32)
    to_1 = -sin_1
    to_2 = sin_2
    if backward:
        to_1 = sin_2
        to_2 = -sin_1
    _rotate_heads(
        query + token * query_token, out_query + token * out_query_token, query_head, out_query_head,
        cos_1, cos_2, to_1, to_2, heads, half, block, rows,
    )  # fmt: skip
    _rotate_heads(
        key + token * key_token, out_key + token * out_key_token, key_head, out_key_head,
        cos_1, cos_2, to_1, to_2, key_heads, half, block, key_rows,
    )  # fmt: skip


@triton.jit
def _rotate_heads(  # type: ignore[no-untyped-def]
    source,
    target,
    source_head,
    target_head,
    cos_1,
    cos_2,
    to_1,
    to_2,
    heads: tl.constexpr,
    half: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
):
    """The first half of each head gets `to_1` of the second one, the second half `to_2` of the first."""
    head = tl.arange(0, rows)[:, None].to(tl.int64)  # a head of a long sequence begins far behind the one before
    column = tl.arange(0, block)[None, :]
    inside = (head < heads) & (column < half)
    place = source + head * source_head + column
    x_1 = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    x_2 = tl.load(place + half, mask=inside, other=0.0).to(tl.float32)
    place = target + head * target_head + column
    tl.store(place, x_1 * cos_1[None, :] + x_2 * to_1[None, :], mask=inside)
    tl.store(place + half, x_2 * cos_2[None, :] + x_1 * to_2[None, :], mask=inside)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        product, count = torch.empty_like(gate), gate.numel()
        if count:
            _gate[(triton.cdiv(count, _BLOCK),)](gate, up, product, count, block=_BLOCK, num_warps=_WARPS)
        ctx.save_for_backward(gate, up)
        return product

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_gate, of_up, count = torch.empty_like(gate), torch.empty_like(up), gate.numel()
        if count:
            _gate_gradients[(triton.cdiv(count, _BLOCK),)](
                *(gate, up, gradient.contiguous(), of_gate, of_up, count), block=_BLOCK, num_warps=_WARPS
            )
        return of_gate, of_up


@triton.jit
def _gate(gate, up, product, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of silu(gate) · up."""
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    x = tl.load(gate + place, mask=place < count, other=0.0).to(tl.float32)
    factor = tl.load(up + place, mask=place < count, other=0.0).to(tl.float32)
    tl.store(product + place, x * tl.sigmoid(x) * factor, mask=place < count)


@triton.jit
def _gate_gradients(gate, up, gradient, of_gate, of_up, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of both gradients: silu'(x) = σ(x) · (1 + x · (1 - σ(x)))."""
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    x = tl.load(gate + place, mask=place < count, other=0.0).to(tl.float32)
    factor = tl.load(up + place, mask=place < count, other=0.0).to(tl.float32)
    slope = tl.load(gradient + place, mask=place < count, other=0.0).to(tl.float32)
    share = tl.sigmoid(x)
    tl.store(of_up + place, slope * x * share, mask=place < count)
    tl.store(of_gate + place, slope * factor * share * (1.0 + x * (1.0 - share)), mask=place < count)
