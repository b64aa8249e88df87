"""Runs the modules of a llama-like Hugging Face model straight over the KV slots.

A small model spends most of a decode step in the Python code between its kernels. For the layout of Llama, Qwen2,
Mistral and many others this runner does the same arithmetic in about fifteen kernel calls per layer, with the prefill
and the decode tokens of a step in the same matrix products. The weights stay the model's own parameters: those
multiplied with the same input are only contiguous in memory, so that one product computes all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from infra.models.device_copies import on_device
from operators.rollout.attention_chunks import AttentionChunk, RowOrder
from operators.rollout.cuda_graphs import CudaGraphs, FixedShapeSteps, without_recording
from operators.rollout.direct_layers import LayerStack, LlamaModules, Pass, all_token_ids
from operators.rollout.kv_slots import KVSlots
from operators.rollout.step_plan import Decode, Prefill, Verify


class DirectRunner:
    """Prefill and decode in one pass over the model's own modules; for models of `llama_layout`.

    If `fixed` (default: on a GPU), steps without prefill run in fixed shapes.
    """

    def __init__(self, model: PreTrainedModel, slots: KVSlots, *, fixed: bool | None = None) -> None:
        self.modules = LlamaModules.of(model, slots.heads, slots.head_size, slots.context)
        self._stack = LayerStack(self.modules, slots, range(len(self.modules.layers)))
        self.preferred_order: np.ndarray | None = None
        """The row order (int64[rows]) in which the last step would attend over less padding, or None."""
        self._fixed: FixedShapeSteps | None = None
        device = self.modules.device
        on_gpu = device.type == "cuda"
        self._order = None if on_gpu else RowOrder()  # on a GPU masking padding is faster than moving rows
        if fixed or (fixed is None and on_gpu):
            rows, record = slots.tensor.shape[2], CudaGraphs().record if on_gpu else without_recording
            self._fixed = FixedShapeSteps(self._decode_fixed, rows, slots.context, device, record)

    def prefill(self, blocks: Sequence[Prefill], layers: Collection[int] | None = None) -> None:
        """Compute the KV of `blocks`; with `layers` store only that of those layers."""
        if blocks:
            self._stack.run(self._embed(None, blocks), self._stack.plan(None, blocks), layers)

    def decode(self, step: Decode, blocks: Sequence[Prefill] = ()) -> torch.Tensor:
        """Compute `blocks` and the step in one pass; returns logits [rows, vocabulary]."""
        if self._fixed is not None and not blocks:
            self.preferred_order = None
            return self._fixed.decode(step)
        what = self._stack.plan(step, blocks)
        if self._order is not None:
            self.preferred_order = self._order.order_if_due(step.positions + 1, [chunk for _, chunk, _ in what.chunks])
        return self.modules.logits(self._stack.run(self._embed(step, blocks), what))

    def verify(self, steps: Verify) -> torch.Tensor:
        """Compute `steps` in one pass; returns logits [steps × rows, vocabulary], step by step."""
        self.preferred_order = None
        token_ids = on_device(steps.token_ids.flatten(), self.modules.device)
        x = self.modules.embedding.index_select(0, token_ids)
        return self.modules.logits(self._stack.run(x, self._stack.plan_verify(steps)))

    def _embed(self, step: Decode | None, blocks: Sequence[Prefill]) -> torch.Tensor:
        token_ids = on_device(all_token_ids(step, blocks), self.modules.device)
        return self.modules.embedding.index_select(0, token_ids)

    def _decode_fixed(self, token_ids: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
        """Logits of rows that all attend over `width` positions; does not read the values of its inputs."""
        rows, stack = len(token_ids), self._stack
        chunk = AttentionChunk(0, rows, width, uniform=False)
        writes = None, stack.columns_up_to(rows), positions
        what = Pass(positions, writes, [(0, chunk, stack.mask(chunk, positions))], (), rows)
        return self.modules.logits(stack.run(self.modules.embedding.index_select(0, token_ids), what))
