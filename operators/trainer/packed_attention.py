"""Causal attention over concatenated sequences without padding.

All operations of a transformer except attention are per token, so they run on packed tokens. Only attention rearranges
the tokens into padded [rows, width] blocks of sequences with similar lengths, without a mask; flash-attn's kernel for
variable lengths, where it is installed, needs no blocks. Any Hugging Face model
that uses `AttentionInterface` works: load it with `attn_implementation=PACKED` and call it with `packed=PackedLayout`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from infra.models.device_copies import on_device
from operators.trainer.context_parallel import ContextSlice

Kernel = Callable[..., Tensor]
_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256
_FIRST_CAPABILITY = (8, 0)
"""Of Ampere, the first architecture that FlashAttention-2 (arXiv 2307.08691) supports."""


def varlen_kernel(query: Tensor) -> Kernel | None:
    """`flash_attn_varlen_func` if it is installed and can compute with `query` [1, h, t, d]; None: use SDPA.

    Under autocast it computes in the dtype to which that casts, as SDPA does.
    """
    if query.device.type != "cuda" or query.shape[-1] > _LARGEST_HEAD or _dtype_of(query) not in _DTYPES:
        return None
    return _installed() if torch.cuda.get_device_capability(query.device) >= _FIRST_CAPABILITY else None


def varlen_attention(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scaling: float | None
) -> Tensor:
    """Attention of `kernel` within each sequence: query float[1, h, t, d], key and value float[1, h_kv, t, d].

    Sequence i has the tokens from `starts[i]` to `starts[i + 1]` (int32[n + 1]), at most `longest`. Returns float[t, h,
    d], of the sequences in their order: nothing is padded or moved.
    """
    dtype = _dtype_of(query)
    tokens = [each.squeeze(0).transpose(0, 1).to(dtype) for each in (query, key, value)]
    repeatable = torch.are_deterministic_algorithms_enabled()
    lengths = (starts, starts, longest, longest)
    return kernel(*tokens, *lengths, softmax_scale=scaling, causal=True, deterministic=repeatable)


def _dtype_of(query: Tensor) -> torch.dtype:
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


@cache
def _installed() -> Kernel | None:
    try:
        import flash_attn  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None
    module: Any = flash_attn
    kernel: Kernel = module.flash_attn_varlen_func
    return kernel


PACKED = "laminar_packed"
_BLOCK_COST = {"cpu": 4_000}
_BLOCK_COST_ELSEWHERE = 1_000_000
"""Cost of one more block, in query-key pairs that attention could compute in the same time: about 0.1 ms on a CPU core,
the launch of a few kernels on an accelerator."""
_UNUSED_KEYWORDS = frozenset({"position_ids", "cache_position"})
"""Keywords that some models pass to attention after using them themselves."""
_NEUTRAL_VALUES: dict[str, object] = {"dropout": 0.0, "is_causal": True}
"""Values of keywords that request nothing; for all other keywords False does."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """The layout of t packed tokens of n sequences: positions int64[1, t] within their sequence.

    `blocks` are rows and width of each padded block, longest sequences first. `to_blocks` int64[Σ rows·width] is the
    packed index of each block position (arbitrary for padding), `from_blocks` int64[t] the inverse. Both are None if
    the orders are equal: sequences sorted from the longest, none padded. `starts` int32[n + 1] has the first token of
    each sequence, and t; `longest` is the most tokens of one. With `part`, tensors outside of attention, and
    `positions`, have that slice of the tokens.
    """

    positions: Tensor
    blocks: tuple[tuple[int, int], ...]
    to_blocks: Tensor | None
    from_blocks: Tensor | None
    starts: Tensor
    longest: int
    part: ContextSlice | None = None


def lay_out(lengths: np.ndarray, device: torch.device) -> PackedLayout:
    """The layout, on `device`, of sequences with `lengths` int64[n] ≥ 1, in this order."""
    total = int(lengths.sum())
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(total) - np.repeat(starts, lengths)
    order = np.argsort(-lengths, kind="stable")
    widths, blocks = _split(lengths[order], _BLOCK_COST.get(device.type, _BLOCK_COST_ELSEWHERE))
    # Padding comes after the sequence in its row: no real token attends to it, and its output is not read.
    begins = np.cumsum(widths) - widths
    to_blocks = np.minimum(np.repeat(starts[order] - begins, widths) + np.arange(widths.sum()), total - 1)
    first = np.empty_like(starts)
    first[order] = begins
    from_blocks = np.repeat(first, lengths) + positions
    moved = len(to_blocks) > total or (to_blocks != np.arange(total)).any()
    inwards, outwards = (on_device(each, device) if moved else None for each in (to_blocks, from_blocks))
    ends = on_device(np.append(starts, total).astype(np.int32), device)
    return PackedLayout(on_device(positions[None], device), blocks, inwards, outwards, ends, int(lengths.max()))


def _split(lengths: np.ndarray, block_cost: int) -> tuple[np.ndarray, tuple[tuple[int, int], ...]]:
    """The padded width of each row, for descending `lengths`, and the rows and width of each block.

    A block ends where the padding of one more row would cost more than another block.
    """
    blocks: list[list[int]] = []
    padding = 0
    for length in lengths.tolist():
        padding += blocks[-1][1] ** 2 - length**2 if blocks else 0
        if not blocks or padding > block_cost:
            blocks.append([0, length])
            padding = 0
        blocks[-1][0] += 1
    rows, widths = np.array(blocks).T
    return np.repeat(widths, rows), tuple((count, width) for count, width in blocks)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedLayout,
    scaling: float | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence.

    query float[1, h, t, d], key and value float[1, h_kv, t, d] with h_kv dividing h; returns float[1, t, h, d]. With a
    context group all have this rank's slice of the tokens.

    Raises ValueError for a mask and any other attention feature (a sliding window, a soft cap, sinks, dropout).
    """
    _reject_keywords(module, attention_mask=attention_mask, **others)
    if packed.part is not None:
        query, key, value = packed.part.to_heads(query, key, value)
    kernel = varlen_kernel(query)
    if kernel is not None:
        tokens = varlen_attention(kernel, query, key, value, packed.starts, packed.longest, scaling)
    else:
        tokens = attention_in_blocks(query, key, value, packed, scaling)
    return (tokens if packed.part is None else packed.part.to_tokens(tokens))[None], None


def attention_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedLayout, scaling: float | None
) -> Tensor:
    """Attention by torch's own kernels over padded blocks; float[t, h, d]."""
    block_tokens = [rows * width for rows, width in packed.blocks]

    def blocks(tensor: Tensor) -> list[Tensor]:
        tokens = tensor.squeeze(0).transpose(0, 1)  # the gradient of tensor[0] would be a copy into zeros
        if packed.to_blocks is not None:
            tokens = _ToBlocks.apply(tokens, packed.to_blocks, packed.from_blocks)
        each = (
            tokens.split(block_tokens) if len(block_tokens) > 1 else (tokens,)
        )  # a split into one part costs a copy in backward
        parts = zip(each, packed.blocks, strict=True)
        return [part.reshape(*block, *part.shape[1:]).transpose(1, 2) for part, block in parts]

    outputs = [
        nn.functional.scaled_dot_product_attention(*parts, is_causal=True, scale=scaling, enable_gqa=True)
        for parts in zip(blocks(query), blocks(key), blocks(value), strict=True)
    ]
    flat = [output.transpose(1, 2).flatten(0, 1) for output in outputs]
    tokens = torch.cat(flat) if len(flat) > 1 else flat[0]
    if packed.from_blocks is not None:
        tokens = _FromBlocks.apply(tokens, packed.from_blocks)
    return tokens


class _ToBlocks(torch.autograd.Function):
    """tokens[to_blocks]. Padding has no gradient, so backward gathers by `from_blocks`: the scatter-add that plain
    indexing uses is slow on a CPU and not deterministic on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, to_blocks: Tensor, from_blocks: Tensor) -> Tensor:
        ctx.from_blocks = from_blocks
        return tokens.index_select(0, to_blocks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, ctx.from_blocks), None, None


class _FromBlocks(torch.autograd.Function):
    """block_tokens[from_blocks]; no index occurs twice."""

    @staticmethod
    def forward(ctx: Any, block_tokens: Tensor, from_blocks: Tensor) -> Tensor:
        ctx.from_blocks, ctx.count = from_blocks, len(block_tokens)
        return block_tokens.index_select(0, from_blocks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_zeros(ctx.count, *gradient.shape[1:]).index_copy_(0, ctx.from_blocks, gradient), None


def _reject_keywords(module: nn.Module, **keywords: object) -> None:
    for name, value in keywords.items():
        if (
            value is None
            or name in _UNUSED_KEYWORDS
            or (not isinstance(value, Tensor) and value == _NEUTRAL_VALUES.get(name, False))
        ):
            continue
        kind = getattr(getattr(module, "config", None), "model_type", "unknown")
        what = f"{tuple(value.shape)} numbers" if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"{type(module).__name__}, of model type {kind}, passes {name} ({what}) to attention, "
            "which packed attention does not support"
        )


def _no_mask(*_: object, **__: object) -> None:
    """No mask: the layout implies causal order within each sequence."""


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, _no_mask)
