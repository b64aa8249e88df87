"""Runs the modules of a llama-like Hugging Face model straight over the KV slots.

A small model spends most of a decode step in the Python code between its kernels. For the layout of Llama, Qwen2,
Mistral and many others this runner does the same arithmetic in about fifteen kernel calls per layer, with the prefill
and the decode tokens of a step in the same matrix products. The weights stay the model's own parameters: those
multiplied with the same input are only contiguous in memory, so that one product computes all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from operators.rollout.attention_chunks import AttentionChunk, RowOrder, split_rows
from operators.rollout.cuda_graphs import CudaGraphs
from operators.rollout.fixed_shape_steps import FixedShapeSteps, without_recording
from operators.rollout.kv_slots import KVSlots
from operators.rollout.llama_layout import fuse_projections
from operators.rollout.step_plan import Decode, Prefill

Writes = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]
"""Which tokens to store, and where: token indices (None for all, in order), KV rows and positions."""


class DirectRunner:
    """Prefill and decode in one pass over the model's own modules; for models of `llama_layout`.

    If `fixed` (default: on a GPU), steps without prefill run in fixed shapes.
    """

    def __init__(self, model: PreTrainedModel, slots: KVSlots, *, fixed: bool | None = None) -> None:
        body: Any = model.model
        self._slots = slots
        self._device, self._dtype = slots.tensor.device, slots.tensor.dtype
        self._size = slots.head_size
        self._kv_heads = slots.heads
        self._heads = body.layers[0].self_attn.q_proj.out_features // self._size
        self._scale = float(body.layers[0].self_attn.scaling)
        self._embedding: torch.Tensor = body.embed_tokens.weight
        self._layers = [fuse_projections(layer) for layer in body.layers]
        self._activation = body.layers[0].mlp.act_fn
        self._silu = getattr(model.config, "hidden_act", None) in ("silu", "swish")
        self._norm: torch.Tensor = body.norm.weight
        self._head: torch.Tensor = model.lm_head.weight
        self._hidden = self._embedding.shape[1]
        self._root_hidden = float(self._hidden) ** 0.5
        self._eps = float(body.norm.variance_epsilon)
        self._root_eps = torch.full((), (self._hidden * self._eps) ** 0.5, dtype=self._dtype, device=self._device)
        self._zero = torch.zeros((), dtype=self._dtype, device=self._device)
        self._no_mask = torch.zeros((1, 1, 1), dtype=self._dtype, device=self._device)
        self._rotary = self._rotary_table(body)
        self._columns = torch.arange(slots.context, device=self._device)
        self._order = RowOrder()
        self.preferred_order: np.ndarray | None = None
        """The row order (int64[rows]) in which the last step would attend over less padding, or None."""
        self._fixed: FixedShapeSteps | None = None
        on_gpu = self._device.type == "cuda"
        if fixed or (fixed is None and on_gpu):
            rows, record = slots.tensor.shape[2], CudaGraphs().record if on_gpu else without_recording
            self._fixed = FixedShapeSteps(self._decode_fixed, rows, slots.context, self._device, record)
        # [layer] -> keys transposed [rows × heads, size, context] and values [rows × heads, context, size]
        self._keys = [layer[0].flatten(0, 1).transpose(1, 2) for layer in slots.layers]
        self._values = [layer[1].flatten(0, 1) for layer in slots.layers]

    def prefill(self, blocks: Sequence[Prefill]) -> None:
        """Compute the KV of `blocks`."""
        if blocks:
            self._run(None, blocks)

    def decode(self, step: Decode, blocks: Sequence[Prefill] = ()) -> torch.Tensor:
        """Compute `blocks` and the step in one pass; returns logits [rows, vocabulary]."""
        if self._fixed is not None and not blocks:
            self.preferred_order = None  # on a GPU masking padding is faster than moving rows
            return self._fixed.decode(step)
        lengths = step.positions + 1
        chunks = split_rows(lengths, self._heads * self._size)
        self.preferred_order = self._order.order_if_due(lengths, chunks)
        return self._logits(self._run((step, chunks), blocks))

    def _decode_fixed(self, token_ids: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
        """Logits of rows that all attend over `width` positions; does not read the values of its inputs."""
        rows = len(token_ids)
        chunk = AttentionChunk(0, rows, width, uniform=False)
        writes = None, self._columns_up_to(rows), positions
        return self._logits(
            self._forward(token_ids, positions, writes, [(chunk, self._mask(chunk, positions))], (), rows)
        )

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(self._rms_norm(x, self._norm), self._head)

    def _run(self, step: tuple[Decode, list[AttentionChunk]] | None, blocks: Sequence[Prefill]) -> torch.Tensor:
        """The residual stream of the decode rows after the last layer, [rows, hidden]."""
        token_ids, positions, rows = _flatten(None if step is None else step[0], blocks)
        decoding = rows if step is not None else 0
        at = torch.from_numpy(positions).to(self._device)
        chunks = [] if step is None else [(chunk, self._mask(chunk, at)) for chunk in step[1]]
        writes = (None, self._columns_up_to(rows), at) if not blocks else self._writes(positions[:decoding], blocks)
        return self._forward(torch.from_numpy(token_ids).to(self._device), at, writes, chunks, blocks, decoding)

    def _forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        writes: Writes,
        chunks: Sequence[tuple[AttentionChunk, torch.Tensor | None]],
        blocks: Sequence[Prefill],
        decoding: int,
    ) -> torch.Tensor:
        """The residual stream of the first `decoding` tokens after the last layer."""
        x = self._embedding.index_select(0, token_ids)
        cos, sin = self._rotary.index_select(0, positions)[:, :, None].unbind(1)
        write_source, write_rows, write_positions = writes
        query_size, rotated_heads = self._heads * self._size, self._heads + self._kv_heads
        rotated_size = rotated_heads * self._size
        last = len(self._layers) - 1
        for i, layer in enumerate(self._layers):
            h = self._rms_norm(x, layer.input_norm)
            qkv = functional.linear(h, layer.qkv, layer.qkv_bias)
            # Rotary embedding in place: q and k are contiguous, so their heads are rotated together.
            qk = qkv[:, :rotated_size].view(-1, rotated_heads, self._size)
            if layer.head_norms is not None:
                self._norm_heads(qk, *layer.head_norms)
            swapped = torch.roll(qk, self._size // 2, -1)
            qk.mul_(cos).addcmul_(swapped, sin)
            kv = qkv[:, query_size:].view(-1, 2, self._kv_heads, self._size)
            self._slots.write(i, write_rows, write_positions, kv if write_source is None else kv[write_source])
            if i == last:  # the rest of the last layer computes logits, which only decode rows need
                blocks, x = (), x[:decoding]
                if not decoding:
                    return x
            attended = [self._attend(i, qkv[chunk.start : chunk.stop], chunk, mask) for chunk, mask in chunks]
            first = decoding
            for block in blocks:
                attended.append(self._attend_causally(i, qkv[first : first + block.token_ids.size], block))
                first += block.token_ids.size
            out = attended[0] if len(attended) == 1 else torch.cat(attended)
            x = torch.addmm(x, out, layer.output)
            gate, up = functional.linear(self._rms_norm(x, layer.mlp_norm), layer.gate_up).chunk(2, -1)
            gated = functional.silu(gate) if self._silu else self._activation(gate)
            x = torch.addmm(x, gated.mul_(up), layer.down)
        return x

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self._dtype != torch.float32:
            return functional.rms_norm(x, (self._hidden,), weight, self._eps)
        # x / sqrt(mean(x²) + eps) in four kernels; torch's own is eight on a CPU. hypot adds eps under the root.
        norm = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._root_eps)
        return torch.addcdiv(self._zero, x, norm, value=self._root_hidden).mul_(weight)

    def _norm_heads(self, qk: torch.Tensor, query_weight: torch.Tensor, key_weight: torch.Tensor) -> None:
        """Norm each head of `qk` [tokens, heads + KV heads, size] in place, as Qwen3 does before rotary embedding."""
        for heads, weight in ((qk[:, : self._heads], query_weight), (qk[:, self._heads :], key_weight)):
            heads.copy_(functional.rms_norm(heads, (self._size,), weight, self._eps))

    def _attend(self, layer: int, qkv: torch.Tensor, chunk: AttentionChunk, mask: torch.Tensor | None) -> torch.Tensor:
        """Attention of `chunk`'s rows over their slots, [rows, heads × size], batched by KV head."""
        group = self._heads // self._kv_heads
        queries = qkv[:, : self._heads * self._size].reshape(-1, group, self._size)
        heads = slice(chunk.start * self._kv_heads, chunk.stop * self._kv_heads)
        keys = self._keys[layer][heads, :, : chunk.width]
        if mask is None:
            scores = torch.baddbmm(self._no_mask, queries, keys, beta=0, alpha=self._scale)
        else:
            scores = torch.baddbmm(mask, queries, keys, alpha=self._scale)
        weights = torch.softmax(scores, -1, dtype=torch.float32)
        if self._dtype != torch.float32:
            weights = weights.to(self._dtype)
        return torch.bmm(weights, self._values[layer][heads, : chunk.width]).view(chunk.stop - chunk.start, -1)

    def _attend_causally(self, layer: int, qkv: torch.Tensor, block: Prefill) -> torch.Tensor:
        """Causal attention of each context of `block`, also over its row's earlier KV, [tokens, heads × size].

        Padding is behind the tokens, so they do not attend to it.
        """
        heads = qkv.view(*block.token_ids.shape, -1, self._size).transpose(1, 2)
        queries, keys, values = torch.split(heads, [self._heads, self._kv_heads, self._kv_heads], 1)
        mask = None
        if block.start:
            end = block.start + block.token_ids.shape[1]
            keys, values = self._slots.layers[layer][:, int(block.row[0]), None, :, :end]
            seen = self._columns[:end] <= self._columns[block.start : end, None]
            mask = torch.where(seen, self._zero, -torch.inf)
        out = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
            enable_gqa=self._heads != self._kv_heads,
        )
        return out.transpose(1, 2).reshape(block.token_ids.size, -1)

    def _mask(self, chunk: AttentionChunk, positions: torch.Tensor) -> torch.Tensor | None:
        """The additive mask [rows × KV heads, 1, width] of a chunk; None if all rows have the same length."""
        if chunk.uniform:
            return None
        hidden = self._columns[: chunk.width] > positions[chunk.start : chunk.stop, None]
        mask = torch.where(hidden, -torch.inf, self._zero)
        return mask.repeat_interleave(self._kv_heads, 0)[:, None]

    def _writes(self, decoded: np.ndarray, blocks: Sequence[Prefill]) -> Writes:
        """Where to store each token of the step: first the decode rows, at positions `decoded`, then the blocks."""
        first = len(decoded)
        source, row, position = [np.arange(first)], [np.arange(first)], [decoded]
        for block in blocks:
            source.append(block.source + first)
            row.append(block.row)
            position.append(block.position)
            first += block.token_ids.size
        at_source, at_row, at_position = (
            torch.from_numpy(np.concatenate(part)).to(self._device) for part in (source, row, position)
        )
        return at_source, at_row, at_position

    def _columns_up_to(self, rows: int) -> torch.Tensor:
        return self._columns[:rows] if rows <= len(self._columns) else torch.arange(rows, device=self._device)

    def _rotary_table(self, body: Any) -> torch.Tensor:
        """Cosines and sines of every position, [context, 2, head_size]; sines are signed for a roll by half a head."""
        positions = torch.arange(self._slots.context, device=self._device)[None]
        with torch.inference_mode():
            cos, sin = body.rotary_emb(self._zero, positions)
        half = self._size // 2
        return torch.stack((cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)), 1).to(self._dtype)


def _flatten(step: Decode | None, blocks: Sequence[Prefill]) -> tuple[np.ndarray, np.ndarray, int]:
    """All tokens of a pass and their positions, int64[tokens], decode rows first; and the number of decode rows."""
    rows = 0 if step is None else len(step.token_ids)
    if step is not None and not blocks:
        return step.token_ids, step.positions, rows
    token_ids = [] if step is None else [step.token_ids]
    positions = [] if step is None else [step.positions]
    for block in blocks:
        contexts, width = block.token_ids.shape
        token_ids.append(block.token_ids.reshape(-1))
        positions.append(np.tile(np.arange(block.start, block.start + width), contexts))
    return np.concatenate(token_ids), np.concatenate(positions), rows
