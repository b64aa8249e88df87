"""Runs any decoder-only Hugging Face model over the KV slots through its own forward.

The model gets prepared 4-D additive masks, explicit positions and a cache whose `update` writes into the slots and
returns views of them, so the forward neither concatenates tensors nor builds masks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from infra.models.device_copies import on_device
from operators.rollout.kv_slots import KVSlots
from operators.rollout.step_plan import Decode, Prefill, Verify


class SlotsCache(Cache):
    """A transformers Cache over `KVSlots`: stores the step's KV at `rows`, `positions`; returns the KV to attend to.

    In decoding that is a view [rows, heads, width, head_size] of the first `shown` rows of the slots (default: as many
    as there are tokens), or of row `extended` alone in the prefill of tokens that follow stored ones. In other prefill
    it is the KV of the step itself ([contexts, heads, tokens, head_size]), and `source` selects which of its tokens to
    store.
    """

    def __init__(
        self,
        slots: KVSlots,
        rows: torch.Tensor,
        positions: torch.Tensor,
        *,
        width: int = 0,
        source: torch.Tensor | None = None,
        extended: int | None = None,
        shown: int | None = None,
    ) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self._slots = slots
        self._rows, self._positions = rows, positions
        self._width, self._source = width, source
        self._shown = slice(len(rows) if shown is None else shown)
        if extended is not None:
            self._shown = slice(extended, extended + 1)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new KV and return the KV to attend to, as the class describes."""
        both = torch.stack((key_states, value_states)).permute(1, 3, 0, 2, 4).flatten(0, 1)
        stored = both if self._source is None else both[self._source]
        self._slots.write(layer_idx, self._rows, self._positions, stored)
        if self._source is not None:
            return key_states, value_states
        layer = self._slots.layers[layer_idx]
        return layer[0, self._shown, :, : self._width], layer[1, self._shown, :, : self._width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before this step. The forward needs only a rough value: positions and masks are explicit."""
        return 0 if self._source is not None else self._width - 1


class ForwardRunner:
    """Prefill and decode passes through `model(...)`."""

    preferred_order: np.ndarray | None = None

    def __init__(self, model: PreTrainedModel, slots: KVSlots) -> None:
        self._model = model
        self._slots = slots
        self._device = slots.tensor.device
        self._dtype = slots.tensor.dtype
        self._columns = torch.arange(slots.context, device=self._device)
        self._rows = torch.arange(slots.tensor.shape[2], device=self._device)

    def prefill(self, blocks: Sequence[Prefill], layers: Collection[int] | None = None) -> None:
        """Compute the KV of `blocks`, of all layers. Raises ValueError for some `layers`."""
        if layers is not None:
            raise ValueError(f"a model's own forward computes all layers, not only {sorted(layers)}")
        for block in blocks:
            token_ids = on_device(block.token_ids, self._device)
            end = block.start + token_ids.shape[1]
            rows, positions = (on_device(each, self._device) for each in (block.row, block.position))
            if block.start:
                cache = SlotsCache(self._slots, rows, positions, width=end, extended=int(block.row[0]))
            else:
                source = on_device(block.source, self._device)
                cache = SlotsCache(self._slots, rows, positions, source=source)
            columns = self._columns[block.start : end]
            # Padding is behind every real token, so the causal mask hides it.
            mask = self._mask(self._columns[None, :end] > columns[:, None]).expand(len(token_ids), 1, -1, -1)
            self._forward(token_ids, columns.expand(len(token_ids), -1), mask, cache)

    def decode(self, step: Decode, blocks: Sequence[Prefill] = ()) -> torch.Tensor:
        """Compute `blocks`, then the step; returns logits [rows, vocabulary]."""
        self.prefill(blocks)
        positions = on_device(step.positions, self._device)
        width = int(step.positions.max()) + 1
        cache = SlotsCache(self._slots, self._rows[: len(positions)], positions, width=width)
        mask = self._mask(self._columns[None, :width] > positions[:, None])[:, None, None, :]
        token_ids = on_device(step.token_ids, self._device)
        return self._forward(token_ids[:, None], positions[:, None], mask, cache)[:, -1]

    def verify(self, steps: Verify) -> torch.Tensor:
        """Compute `steps` in one pass; returns logits [steps × rows, vocabulary], step by step."""
        token_ids, positions = (on_device(each.T.copy(), self._device) for each in (steps.token_ids, steps.positions))
        rows, count = positions.shape
        width = int(steps.positions.max()) + 1
        stored = self._rows[:rows].repeat_interleave(count)
        cache = SlotsCache(self._slots, stored, positions.flatten(), width=width, shown=rows)
        mask = self._mask(self._columns[:width] > positions[:, :, None])[:, None]
        return self._forward(token_ids, positions, mask, cache, count).transpose(0, 1).flatten(0, 1)

    def _forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cache: SlotsCache,
        keep: int = 1,
    ) -> torch.Tensor:
        """The logits of the last `keep` tokens of each row, [rows, keep, vocabulary]."""
        logits: torch.Tensor = self._model(
            input_ids=token_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits
        return logits[:, -keep:]

    def _mask(self, hidden: torch.Tensor) -> torch.Tensor:
        """The additive mask for `hidden` positions: the lowest number, not -inf, because some models add masks up."""
        lowest = torch.finfo(self._dtype).min
        return torch.zeros((), dtype=self._dtype, device=self._device).masked_fill(hidden, lowest)


def kv_geometry(model: PreTrainedModel) -> tuple[int, int, int]:
    """Layers, KV heads and head size of `model`, measured by a forward pass of one token.

    Raises ValueError if its layers differ in these: its KV does not fit the slots.
    """
    cache = DynamicCache()
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        model(input_ids=token, past_key_values=cache, use_cache=True)
    shapes = {tuple(tensor.shape) for layer in cache.layers for tensor in (layer.keys, layer.values)}
    if len(shapes) != 1:
        raise ValueError(f"{type(model).__name__}: keys and values differ in shape between layers: {sorted(shapes)}")
    (shape,) = shapes
    return len(cache.layers), shape[1], shape[3]
