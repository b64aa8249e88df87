"""One stage: some layers of a model over KV slots of their own; and a step's plan as arrays of a message."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from infra.transport.frames import ProtocolError
from operators.rollout.direct_layers import LayerStack, LlamaModules
from operators.rollout.kv_slots import KVSlots
from operators.rollout.step_plan import Decode, Prefill

PLAN_ARRAYS = 6


class StageModel:
    """Layers `layers` of a model, for the requests of a group: at most `rows` of at most `context` tokens each.

    Their KV is in `slots`, or in memory of its own. Raises RuntimeError or MemoryError if there is too little.
    """

    def __init__(
        self, modules: LlamaModules, layers: range, rows: int, context: int, slots: KVSlots | None = None
    ) -> None:
        self.layers, self.rows, self.context = layers, rows, context
        self._modules = modules
        self.slots = slots or KVSlots(
            layers=len(layers),
            rows=rows,
            heads=modules.kv_heads,
            context=context,
            head_size=modules.head_size,
            dtype=modules.dtype,
            device=modules.device,
        )
        self._stack = LayerStack(modules, self.slots, layers)

    def run(
        self, x: torch.Tensor, step: Decode | None, blocks: Sequence[Prefill], stored: Collection[int] | None
    ) -> torch.Tensor:
        """The residual stream after these layers, as `LayerStack.run`."""
        return self._stack.run(x, self._stack.plan(step, blocks), stored)

    def to_bytes(self, x: torch.Tensor) -> np.ndarray:
        """The residual stream `x` [tokens, hidden] as its bytes, uint8[tokens, hidden × bytes per element]."""
        found: np.ndarray = x.contiguous().cpu().view(torch.uint8).numpy()
        return found

    def from_bytes(self, data: np.ndarray) -> torch.Tensor:
        """The residual stream in `data`, as `to_bytes` returns it. Raises ProtocolError for another width."""
        m = self._modules
        width = m.hidden * m.embedding.element_size()
        if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != width:
            raise ProtocolError(f"hidden states of {data.dtype} {data.shape}, expected rows of {width} bytes")
        return torch.from_numpy(data.copy()).view(m.dtype).to(m.device)


def encode_plan(step: Decode | None, blocks: Sequence[Prefill]) -> list[np.ndarray]:
    """`step` and `blocks` without their token ids, which only the first stage needs: PLAN_ARRAYS arrays of int64."""
    positions = np.zeros(0, np.int64) if step is None else step.positions
    first = -1 if step is None else step.first_row
    shapes = [(*block.token_ids.shape, block.start, len(block.source)) for block in blocks]
    empty = np.zeros(0, np.int64)
    joined = [
        np.concatenate([getattr(block, name) for block in blocks]).astype(np.int64) if blocks else empty
        for name in ("source", "row", "position")
    ]
    return [
        positions.astype(np.int64),
        np.array([first], np.int64),
        np.array(shapes, np.int64).reshape(-1, 4),
        *joined,
    ]


def decode_plan(arrays: Sequence[np.ndarray], rows: int, context: int) -> tuple[Decode | None, list[Prefill]]:
    """The step and the blocks of `encode_plan`, with zeros as token ids.

    Raises ProtocolError for rows, positions or sizes out of range.
    """
    if len(arrays) != PLAN_ARRAYS or any(array.dtype != np.int64 for array in arrays):
        raise ProtocolError(f"a plan of {len(arrays)} arrays, expected {PLAN_ARRAYS} of int64")
    positions, first, shapes, source, row, position = arrays
    flat = all(array.ndim == 1 for array in (positions, first, source, row, position))
    if not flat or first.shape != (1,) or shapes.ndim != 2 or shapes.shape[1] != 4:
        raise ProtocolError("a plan whose arrays have other shapes")
    _check("a decode row", len(positions) + max(0, int(first[0])), rows + 1)
    _check("a position", positions, context)
    _check("a position", position, context)
    _check("a row", row, rows)
    if not len(source) == len(row) == len(position) == int(shapes[:, 3].sum()) or (shapes < 0).any():
        raise ProtocolError("a plan whose blocks do not agree with its arrays")
    blocks, at = [], 0
    for contexts, width, start, count in shapes.tolist():
        end = at + count
        _check("a block", contexts * width, rows * context + 1)
        _check("a token of a block", source[at:end], contexts * width)
        _check("a start", start + width, context + 1)
        token_ids = np.broadcast_to(np.int64(0), (contexts, width))
        blocks.append(Prefill(token_ids, source[at:end], row[at:end], position[at:end], start))
        at = end
    step = None if first[0] < 0 else Decode(np.broadcast_to(np.int64(0), positions.shape), positions, int(first[0]))
    return step, blocks


def _check(what: str, numbers: np.ndarray | int, limit: int) -> None:
    """Raise ProtocolError unless all `numbers` are from 0 to `limit` − 1."""
    values = np.atleast_1d(numbers)
    if values.size and not 0 <= int(values.min()) <= int(values.max()) < limit:
        raise ProtocolError(f"{what} of a plan is out of range: {int(values.min())} to {int(values.max())}")
