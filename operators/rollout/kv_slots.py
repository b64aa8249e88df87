"""The keys and values of every running row, in preallocated memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy

import numpy as np
import torch

from infra.models.device_copies import moved, on_device
from operators.rollout.engine import KV
from operators.rollout.kv_rows import RowCopy

CONTEXT_UNIT = 16


class KVSlots:
    """Preallocated KV: `tensor[layer, 0|1 (keys, values), row, head, position, :]`, contiguous per row and head.

    Position p of a row is its p-th token from the start of the prompt; `context` is rounded up to a multiple of
    `CONTEXT_UNIT`, so that attention may read on behind a row. The memory starts as zeros, which on a CPU
    the system commits page by page on the first write. Values behind a row's length are stale but finite; readers mask
    them.
    """

    def __init__(
        self,
        *,
        layers: int,
        rows: int,
        heads: int,
        context: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        context = -(-context // CONTEXT_UNIT) * CONTEXT_UNIT
        self.tensor = torch.zeros(layers, 2, rows, heads, context, head_size, dtype=dtype, device=device)
        self.layers = list(self.tensor.unbind())
        self.heads, self.head_size, self.context = heads, head_size, context

    def part(self, layers: range) -> KVSlots:
        """These layers, in the same memory."""
        found = copy(self)
        found.tensor = self.tensor[layers.start : layers.stop]
        found.layers = list(found.tensor.unbind())
        return found

    def write(self, layer: int, rows: torch.Tensor, positions: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Store `keys_values` [tokens, 2, heads, head_size] at (`rows`, `positions`), int64[tokens] each."""
        self.layers[layer][:, rows, :, positions] = keys_values

    def copy(self, copies: Sequence[RowCopy]) -> None:
        """Copy between rows, in order: a row that moves, or a prompt that another row shares."""
        for source, target, length in copies:
            self.tensor[:, :, target, :, :length] = self.tensor[:, :, source, :, :length]

    def export_row(self, row: int, tokens: int) -> KV:
        """A copy of the KV of the first `tokens` tokens of `row`: `[layer, 0|1, head, position, :]`."""
        copied = moved(self.tensor[:, :, row, :, :tokens].contiguous(), torch.device("cpu"))
        if self.tensor.is_cuda:
            torch.cuda.current_stream(self.tensor.device).synchronize()
        return KV(tokens, memoryview(copied.view(torch.uint8).flatten().numpy().data))

    def import_row(self, row: int, kv: KV, tokens: int) -> bool:
        """Store the first `tokens` tokens of `kv`, an `export_row` of other slots, in `row`, or as many as it has.

        Returns False, and changes nothing, if its size does not match.
        """
        layers, _, _, heads, _, size = self.tensor.shape
        layout_tokens = kv.layout_tokens or kv.tokens
        if (
            kv.parts
            or not layout_tokens
            or len(kv.data) != layers * 2 * heads * layout_tokens * size * self.tensor.element_size()
        ):
            return False
        values = torch.frombuffer(kv.data, dtype=self.tensor.dtype).view(layers, 2, heads, layout_tokens, size)
        held = min(tokens, kv.tokens)
        self.tensor[:, :, row, :, :held] = on_device(values[..., :held, :].contiguous(), self.tensor.device)
        return True

    def read_row(self, row: int, tokens: int) -> dict[int, memoryview]:
        """A copy of the KV of the first `tokens` tokens of `row`, by layer: `[0|1, head, position, :]`."""
        data = self.export_row(row, tokens).data
        each = len(data) // max(1, len(self.layers))
        return {layer: data[layer * each : (layer + 1) * each] for layer in range(len(self.layers))}

    def write_row(self, row: int, layout_tokens: int, tokens: int, layers: Mapping[int, memoryview]) -> set[int]:
        """Store the first `tokens` tokens of `layers`, as `read_row` of `layout_tokens` tokens returned them.

        Returns the layers that were stored: those whose size matches.
        """
        _, _, _, heads, _, size = self.tensor.shape
        expected = 2 * heads * layout_tokens * size * self.tensor.element_size()
        stored = {layer for layer, data in layers.items() if layer < len(self.layers) and len(data) == expected}
        for layer in stored if expected else ():
            values = torch.frombuffer(layers[layer], dtype=self.tensor.dtype).view(2, heads, layout_tokens, size)
            self.tensor[layer, :, row, :, :tokens] = on_device(values[..., :tokens, :].contiguous(), self.tensor.device)
        return stored

    def permute(self, order: np.ndarray, width: int) -> None:
        """Reorder the first `width` positions: row i becomes the former row `order[i]` (int64[rows], a permutation)."""
        index = on_device(order, self.tensor.device)
        for layer in self.layers:  # layer by layer, which bounds the temporary copy
            layer[:, : len(order), :, :width] = layer[:, index, :, :width]

    def clear_from(self, row: int, position: int) -> None:
        """Zero `row` from `position` on."""
        self.tensor[:, :, row, :, position:] = 0

    def clear(self, rows: Sequence[int]) -> None:
        """Zero `rows`: values that are not finite would corrupt later requests through 0 × NaN behind the mask."""
        self.tensor[:, :, list(rows)] = 0
