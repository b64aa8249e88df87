"""Causal attention over sequences that lie one after the other without padding.

Everything in a transformer but attention looks at one token, so it can run on packed tokens; only here are they laid
out as a padded [n, width] block. With lengths alike this computes no more than it must, and on a CPU it was 8-10 %
quicker than padded micro-batches of the same sequences (benchmarks/packing.py). Any Hugging Face model that takes its
attention from `AttentionInterface` works: load it with `attn_implementation=PACKED` and call it with
`packed=PackedLayout`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

PACKED = "laminar_packed"
_INERT = frozenset({"position_ids", "cache_position"})
"""Told to attention by some models; they have been used by then."""
_WITHOUT: dict[str, object] = {"dropout": 0.0, "is_causal": True}
"""What these keywords say where nothing is asked for; of all others it is False."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """Where t packed tokens of n sequences stand: positions int64[1, t] within their sequence; `block` int64[n·width]
    has the packed place of each place of the padded block (any, beyond a sequence's end), `flat` int64[t] the
    reverse.
    """

    positions: Tensor
    block: Tensor
    flat: Tensor
    count: int
    width: int

    def to(self, device: torch.device) -> PackedLayout:
        """The same layout on `device`."""
        return replace(
            self, positions=self.positions.to(device), block=self.block.to(device), flat=self.flat.to(device)
        )


def lay_out(lengths: np.ndarray) -> PackedLayout:
    """The layout of sequences of `lengths` int64[n] ≥ 1 in their order."""
    total, width, count = int(lengths.sum()), int(lengths.max()), len(lengths)
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(total) - np.repeat(starts, lengths)
    # What lies beyond a sequence's end is later in its row, so no real token attends to it and its output is not read.
    block = np.minimum(starts[:, None] + np.arange(width), total - 1)
    flat = np.repeat(np.arange(count) * width, lengths) + positions
    return PackedLayout(
        torch.from_numpy(positions)[None], torch.from_numpy(block.ravel()), torch.from_numpy(flat), count, width
    )


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
    heads, width = query.shape[1], query.shape[3]

    def block(tensor: Tensor) -> Tensor:
        tokens = tensor[0].transpose(0, 1).index_select(0, packed.block)
        return tokens.view(packed.count, packed.width, tokens.shape[1], width).transpose(1, 2)

    output = nn.functional.scaled_dot_product_attention(
        block(query), block(key), block(value), is_causal=True, scale=scaling, enable_gqa=True
    )
    rows = output.transpose(1, 2).reshape(packed.count * packed.width, heads, width)
    return rows.index_select(0, packed.flat)[None], None


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
