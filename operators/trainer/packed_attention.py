"""Causal attention over sequences that lie one after the other without padding.

Everything in a transformer but attention looks at one token, so it can run on packed tokens; only here are they laid
out as padded [rows, width] blocks, each of sequences about as long as one another, without a mask. Any Hugging Face
model that takes its attention from `AttentionInterface` works: load it with `attn_implementation=PACKED` and call it
with `packed=PackedLayout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

PACKED = "laminar_packed"
_BLOCK_COST = {"cpu": 4_000}
_BLOCK_COST_ELSEWHERE = 1_000_000
"""What one more block costs, in pairs of a query and a key that could be attended to meanwhile: about 0.1 ms on a CPU
core, the launches of some kernels on an accelerator."""
_INERT = frozenset({"position_ids", "cache_position"})
"""Told to attention by some models; they have been used by then."""
_WITHOUT: dict[str, object] = {"dropout": 0.0, "is_causal": True}
"""What these keywords say where nothing is asked for; of all others it is False."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """Where t packed tokens of n sequences stand: positions int64[1, t] within their sequence.

    `blocks` are rows and width of each padded block, the longest sequences in the first; `there` int64[Σ rows·width]
    has the packed place of each of their places (any, beyond a sequence's end), `back` int64[t] the reverse. Both are
    None where nothing has to be moved: sequences from the longest on, none of them padded.
    """

    positions: Tensor
    blocks: tuple[tuple[int, int], ...]
    there: Tensor | None
    back: Tensor | None


def lay_out(lengths: np.ndarray, device: torch.device) -> PackedLayout:
    """The layout on `device` of sequences of `lengths` int64[n] ≥ 1 in their order."""
    total = int(lengths.sum())
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(total) - np.repeat(starts, lengths)
    order = np.argsort(-lengths, kind="stable")
    widths, blocks = _split(lengths[order], _BLOCK_COST.get(device.type, _BLOCK_COST_ELSEWHERE))
    # What lies beyond a sequence's end is later in its row, so no real token attends to it and its output is not read.
    begins = np.cumsum(widths) - widths
    there = np.minimum(np.repeat(starts[order] - begins, widths) + np.arange(widths.sum()), total - 1)
    first = np.empty_like(starts)
    first[order] = begins
    back = np.repeat(first, lengths) + positions
    moved = len(there) > total or (there != np.arange(total)).any()
    indices = (torch.from_numpy(each).to(device) if moved else None for each in (there, back))
    return PackedLayout(torch.from_numpy(positions)[None].to(device), blocks, *indices)


def _split(lengths: np.ndarray, block_cost: int) -> tuple[np.ndarray, tuple[tuple[int, int], ...]]:
    """How wide each row is padded, of `lengths` from the longest on, and the rows and width of each block.

    A block ends where one more row would make its padding cost more than another block does.
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
    """Each token's attention to those before it in its own sequence.

    query float[1, h, t, d], key and value float[1, h_kv, t, d] with h_kv dividing h; gives float[1, t, h, d].

    Raises ValueError for a mask and for whatever else a model asks of its attention (a window, a soft cap, sinks,
    dropout): this is causal attention and no more.
    """
    _refuse(module, attention_mask=attention_mask, **others)
    places = [rows * width for rows, width in packed.blocks]

    def blocks(tensor: Tensor) -> list[Tensor]:
        tokens = tensor[0].transpose(0, 1)
        if packed.there is not None:
            tokens = _ToBlocks.apply(tokens, packed.there, packed.back)
        each = tokens.split(places) if len(places) > 1 else (tokens,)  # a split of one costs a copy on its way back
        parts = zip(each, packed.blocks, strict=True)
        return [part.reshape(*block, *part.shape[1:]).transpose(1, 2) for part, block in parts]

    outputs = [
        nn.functional.scaled_dot_product_attention(*parts, is_causal=True, scale=scaling, enable_gqa=True)
        for parts in zip(blocks(query), blocks(key), blocks(value), strict=True)
    ]
    flat = [output.transpose(1, 2).flatten(0, 1) for output in outputs]
    tokens = torch.cat(flat) if len(flat) > 1 else flat[0]
    return (tokens if packed.back is None else _FromBlocks.apply(tokens, packed.back))[None], None


class _ToBlocks(torch.autograd.Function):
    """tokens[there]. What pads a block has no gradient, so the gradient is read from where the tokens went: adding up
    over `there`, as indexing does, is slow on a CPU and not deterministic on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        return tokens.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, ctx.back), None, None


class _FromBlocks(torch.autograd.Function):
    """places[back], each of them once."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, back: Tensor) -> Tensor:
        ctx.back, ctx.count = back, len(places)
        return places.index_select(0, back)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_zeros(ctx.count, *gradient.shape[1:]).index_copy_(0, ctx.back, gradient), None


def _refuse(module: nn.Module, **asked: object) -> None:
    for name, value in asked.items():
        if value is None or name in _INERT or (not isinstance(value, Tensor) and value == _WITHOUT.get(name, False)):
            continue
        kind = getattr(getattr(module, "config", None), "model_type", "unknown")
        what = f"{tuple(value.shape)} numbers" if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"{type(module).__name__}, of model type {kind}, asks attention for {name} ({what}), "
            "which packed attention does not know"
        )


def _no_mask(*_: object, **__: object) -> None:
    """Causal order within a sequence is in the layout."""


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, _no_mask)
