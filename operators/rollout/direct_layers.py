"""A range of the layers of a llama-like model, computed over KV slots of their own.

A whole engine has one such stack with all layers; a stage of a group of replicas has one with the layers that it runs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from infra.models.device_copies import on_device
from operators.rollout.attention_chunks import AttentionChunk, split_rows
from operators.rollout.kv_slots import KVSlots
from operators.rollout.llama_layout import LlamaLayer, fuse_projections
from operators.rollout.stable_products import WIDTH_UNIT, attention_parts, least_rows, least_width, weighted_sums
from operators.rollout.step_plan import Decode, Prefill, Verify

Writes = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]
"""Which tokens to store, and where: token indices (None for all, in order), KV rows and positions."""


@dataclass(frozen=True, slots=True, eq=False)
class LlamaModules:
    """The parameters of a llama-like model, which stay the model's own, and its constants. Built once for a model: it
    fuses the projections of each layer."""

    embedding: torch.Tensor
    layers: list[LlamaLayer]
    norm: torch.Tensor
    head: torch.Tensor
    activation: Any
    silu: bool
    heads: int
    kv_heads: int
    head_size: int
    scale: float
    hidden: int
    least_tokens: int
    """Matrix products over fewer tokens sum in another order, so smaller passes are padded."""
    least_width: int
    """Over how many positions a decode step attends at least: over fewer, scores are summed in another order."""
    eps: float
    root_eps: torch.Tensor
    zero: torch.Tensor
    rotary: torch.Tensor
    """Cosines and sines of every position, [context, 2, head_size]; sines are signed for a roll by half a head."""

    @classmethod
    def of(cls, model: PreTrainedModel, kv_heads: int, head_size: int, context: int) -> LlamaModules:
        """The modules of `model`, which has `llama_layout`; positions are below `context`."""
        body: Any = model.model
        attention, embedding = body.layers[0].self_attn, body.embed_tokens.weight
        device, dtype, hidden = embedding.device, embedding.dtype, embedding.shape[1]
        layers = [fuse_projections(layer) for layer in body.layers]
        heads = attention.q_proj.out_features // head_size
        inputs = {hidden, *(len(weight) for layer in layers for weight in (layer.output, layer.down))}
        eps = float(body.norm.variance_epsilon)
        zero = torch.zeros((), dtype=dtype, device=device)
        return cls(
            embedding=embedding,
            layers=layers,
            norm=body.norm.weight,
            head=model.lm_head.weight,
            activation=body.layers[0].mlp.act_fn,
            silu=getattr(model.config, "hidden_act", None) in ("silu", "swish"),
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            scale=float(attention.scaling),
            hidden=hidden,
            least_tokens=max(least_rows(each, dtype, device.type) for each in inputs),
            least_width=least_width(heads // kv_heads, head_size, float(attention.scaling), dtype, device.type),
            eps=eps,
            root_eps=torch.full((), (hidden * eps) ** 0.5, dtype=dtype, device=device),
            zero=zero,
            rotary=_rotary_table(body, zero, head_size, context),
        )

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [tokens, ...], followed by zeros if it has fewer than `least_tokens`."""
        missing = self.least_tokens - len(x)
        return torch.cat((x, x.new_zeros((missing, *x.shape[1:])))) if missing > 0 else x

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`x` [tokens, hidden] after the RMS norm with `weight`."""
        if self.dtype != torch.float32:
            return functional.rms_norm(x, (self.hidden,), weight, self.eps)
        # x / sqrt(mean(x²) + eps) in four kernels; torch's own is eight on a CPU. hypot adds eps under the root.
        norm = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.root_eps)
        return torch.addcdiv(self.zero, x, norm, value=float(self.hidden) ** 0.5).mul_(weight)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The logits [rows, vocabulary] of the residual stream `x` after the last layer."""
        return functional.linear(self.rms_norm(self.padded(x), self.norm), self.head)[: len(x)]


@dataclass(frozen=True, slots=True, eq=False)
class CausalBlock:
    """A block to prefill, with the mask [tokens, context] of one that attends to earlier KV.

    For others `parts` are the runs of contexts that attend together: first, last + 1 and the width that they need.
    """

    block: Prefill
    mask: torch.Tensor | None
    parts: list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """What one pass computes, as tensors: first `decoding` tokens of decode rows from KV row `first_row` on, then
    `blocks`.

    `positions` is int64[tokens]; each attention chunk comes with the number of its first token and its mask.
    """

    positions: torch.Tensor
    writes: Writes
    chunks: list[tuple[int, AttentionChunk, torch.Tensor | None]]
    blocks: Sequence[CausalBlock]
    decoding: int
    first_row: int = 0
    alone: torch.Tensor | None = None
    """The mask [rows, steps, 1, width] of a verification of few rows, whose KV heads are computed one by one."""


class LayerStack:
    """Layers `layers` of `modules` over `slots`, which has the KV of these layers only."""

    def __init__(self, modules: LlamaModules, slots: KVSlots, layers: range) -> None:
        self.layers, self.slots, self._m = layers, slots, modules
        self._columns = torch.arange(slots.context, device=modules.device)
        self._no_mask = torch.zeros((1, 1, 1), dtype=modules.dtype, device=modules.device)
        # [layer] -> keys transposed [rows × heads, size, context] and values [rows × heads, context, size]
        self._keys = [layer[0].flatten(0, 1).transpose(1, 2) for layer in slots.layers]
        self._values = [layer[1].flatten(0, 1) for layer in slots.layers]

    def plan(self, step: Decode | None, blocks: Sequence[Prefill]) -> Pass:
        """The pass that computes `step` and `blocks`."""
        positions = all_positions(step, blocks)
        at = on_device(positions, self._m.device)
        masked = [CausalBlock(each, self._mask_of(each), attention_parts(each, self._m.device)) for each in blocks]
        if step is None:
            return Pass(at, self._writes(positions[:0], 0, blocks), [], masked, 0)
        rows, first = len(step.positions), step.first_row
        chunks = split_rows(step.positions + 1, self._m.heads * self._m.head_size)
        if blocks:
            writes = self._writes(step.positions, first, blocks)
        else:
            writes = (None, self.columns_up_to(first + rows)[first:], at)
        return Pass(at, writes, [(c.start, c, self.mask(c, at)) for c in chunks], masked, rows, first)

    def plan_verify(self, steps: Verify) -> Pass:
        """The pass that computes all of `steps`: the queries of each attend as if it were alone."""
        count, rows = steps.positions.shape
        at = on_device(steps.positions, self._m.device)
        writes = None, self.columns_up_to(rows).repeat(count), at.flatten()
        if rows * self._m.kv_heads < count:
            chunk = AttentionChunk(0, rows, int(steps.positions.max()) + 1, uniform=False)
            alone = torch.where(self._columns[: self._width(chunk)] > at.t()[:, :, None], -torch.inf, self._m.zero)
            return Pass(at.flatten(), writes, [], (), count * rows, alone=alone[:, :, None])
        split = split_rows(steps.positions.max(0) + 1, self._m.heads * self._m.head_size)
        split = [replace(chunk, uniform=False) for chunk in split]
        chunks = [(n * rows + c.start, c, self.mask(c, at[n])) for n in range(count) for c in split]
        return Pass(at.flatten(), writes, chunks, (), count * rows)

    def run(self, x: torch.Tensor, what: Pass, stored: Collection[int] | None = None) -> torch.Tensor:
        """The residual stream [tokens, hidden] after these layers; after the model's last one that of the decode rows.

        With `stored` only the KV of those layers is stored, and later layers are not computed.
        """
        m, slots, blocks, decoding, tokens = self._m, self.slots, what.blocks, what.decoding, len(x)
        x, positions = (m.padded(each) for each in (x, what.positions))
        cos, sin = m.rotary.index_select(0, positions)[:, :, None].unbind(1)
        write_source, write_rows, write_positions = what.writes
        query_size, rotated_heads = m.heads * m.head_size, m.heads + m.kv_heads
        rotated_size = rotated_heads * m.head_size
        last = len(m.layers) - 1
        for i, number in enumerate(self.layers):
            layer = m.layers[number]
            if stored is not None and number > max(stored):
                return x
            h = m.rms_norm(x, layer.input_norm)
            qkv = functional.linear(h, layer.qkv, layer.qkv_bias)
            # Rotary embedding in place: q and k are contiguous, so their heads are rotated together.
            qk = qkv[:, :rotated_size].view(-1, rotated_heads, m.head_size)
            if layer.head_norms is not None:
                self._norm_heads(qk, *layer.head_norms)
            swapped = torch.roll(qk, m.head_size // 2, -1)
            qk.mul_(cos).addcmul_(swapped, sin)
            if stored is None or number in stored:
                kv = qkv[:, query_size:].view(-1, 2, m.kv_heads, m.head_size)
                slots.write(i, write_rows, write_positions, kv[:tokens] if write_source is None else kv[write_source])
            if number == last:  # the rest of the last layer computes logits, which only decode rows need
                if not decoding:
                    return x[:0]
                blocks, x, tokens = (), m.padded(x[:decoding]), decoding
            attended = [
                self._attend(i, qkv[start : start + chunk.stop - chunk.start], chunk, mask, what.first_row)
                for start, chunk, mask in what.chunks
            ]
            if what.alone is not None:
                attended = [self._attend_alone(i, qkv[:tokens], what.alone)]
            first = decoding
            for each in blocks:
                tokens_of = slice(first, first + each.block.token_ids.size)
                attended.append(self._attend_causally(i, qkv[tokens_of], each))
                first = tokens_of.stop
            out = m.padded(attended[0] if len(attended) == 1 else torch.cat(attended))
            x = torch.addmm(x, out, layer.output)
            gate, up = functional.linear(m.rms_norm(x, layer.mlp_norm), layer.gate_up).chunk(2, -1)
            gated = functional.silu(gate) if m.silu else m.activation(gate)
            x = torch.addmm(x, gated.mul_(up), layer.down)
        return x[:tokens]

    def _norm_heads(self, qk: torch.Tensor, query_weight: torch.Tensor, key_weight: torch.Tensor) -> None:
        """Norm each head of `qk` [tokens, heads + KV heads, size] in place, as Qwen3 does before rotary embedding."""
        for heads, weight in ((qk[:, : self._m.heads], query_weight), (qk[:, self._m.heads :], key_weight)):
            heads.copy_(functional.rms_norm(heads, (self._m.head_size,), weight, self._m.eps))

    def _attend(
        self, layer: int, qkv: torch.Tensor, chunk: AttentionChunk, mask: torch.Tensor | None, first_row: int
    ) -> torch.Tensor:
        """Attention of `chunk`'s rows over their slots, [rows, heads × size], batched by KV head."""
        group = self._m.heads // self._m.kv_heads
        queries = qkv[:, : self._m.heads * self._m.head_size].reshape(-1, group, self._m.head_size)
        first = (first_row + chunk.start) * self._m.kv_heads
        heads = slice(first, first + (chunk.stop - chunk.start) * self._m.kv_heads)
        width = self._width(chunk)
        keys = self._keys[layer][heads, :, :width]
        if mask is None:
            scores = torch.baddbmm(self._no_mask, queries, keys, beta=0, alpha=self._m.scale)
            if width > chunk.width:
                scores[:, :, chunk.width :] = -torch.inf
        else:
            scores = torch.baddbmm(mask, queries, keys, alpha=self._m.scale)
        weights = torch.softmax(scores, -1, dtype=torch.float32)
        if self._m.dtype != torch.float32:
            weights = weights.to(self._m.dtype)
        return weighted_sums(weights, self._values[layer][heads, :width]).view(chunk.stop - chunk.start, -1)

    def _attend_alone(self, layer: int, qkv: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Attention of all steps of a verification, [steps × rows, heads × size], batched by step for each KV head.

        Steps share the keys of a head, and every product has the size that it has in a decode step.
        """
        m, (rows, steps, _, width) = self._m, mask.shape
        heads, group = rows * m.kv_heads, m.heads // m.kv_heads
        queries = qkv[:, : m.heads * m.head_size].reshape(steps, heads, group, m.head_size).transpose(0, 1).contiguous()
        scores = queries.new_empty((heads, steps, group, width))
        for head in range(heads):
            keys = self._keys[layer][head, :, :width].expand(steps, -1, -1)
            torch.baddbmm(mask[head // m.kv_heads], queries[head], keys, alpha=m.scale, out=scores[head])
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(m.dtype)
        out = torch.empty_like(queries)
        for head in range(heads):
            weighted_sums(weights[head], self._values[layer][head, :width].expand(steps, -1, -1), out=out[head])
        return out.transpose(0, 1).reshape(steps * rows, -1)

    def _mask_of(self, block: Prefill) -> torch.Tensor | None:
        """The additive mask of a block that attends over its row's earlier KV, too; None for another."""
        if not block.start:
            return None
        end = block.start + block.token_ids.shape[1]
        seen = self._columns[:end] <= self._columns[block.start : end, None]
        return torch.where(seen, self._m.zero, -torch.inf)

    def _attend_causally(self, layer: int, qkv: torch.Tensor, what: CausalBlock) -> torch.Tensor:
        """Causal attention of each context of a block, also over its row's earlier KV, [tokens, heads × size].

        Padding is behind the tokens, so they do not attend to it.
        """
        block, split = what.block, [self._m.heads, self._m.kv_heads, self._m.kv_heads]
        contexts, width = block.token_ids.shape
        heads = qkv.view(contexts, width, -1, self._m.head_size).transpose(1, 2)
        if block.start:
            queries = heads[:, : self._m.heads]
            keys, values = self.slots.layers[layer][:, int(block.row[0]), None, :, : block.start + width]
            attended = self._attend_to(queries, keys, values, what.mask)
        else:
            parts = []
            for first, last, own in what.parts:
                padded = functional.pad(heads[first:last, :, :own], (0, 0, 0, -own % WIDTH_UNIT))
                part = self._attend_to(*torch.split(padded, split, 1))[:, :, :own]
                parts.append(part if own == width else functional.pad(part, (0, 0, 0, width - own)))
            attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return attended.transpose(1, 2).reshape(block.token_ids.size, -1)

    def _attend_to(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._m.scale,
            enable_gqa=self._m.heads != self._m.kv_heads,
        )

    def mask(self, chunk: AttentionChunk, positions: torch.Tensor) -> torch.Tensor | None:
        """The additive mask [rows × KV heads, 1, width] of a chunk; None if all rows have the same length."""
        if chunk.uniform:
            return None
        hidden = self._columns[: self._width(chunk)] > positions[chunk.start : chunk.stop, None]
        mask = torch.where(hidden, -torch.inf, self._m.zero)
        return mask.repeat_interleave(self._m.kv_heads, 0)[:, None]

    def _width(self, chunk: AttentionChunk) -> int:
        """The positions over which `chunk` attends, those that its mask hides included."""
        return min(max(-(-chunk.width // WIDTH_UNIT) * WIDTH_UNIT, self._m.least_width), self.slots.context)

    def _writes(self, decoded: np.ndarray, first_row: int, blocks: Sequence[Prefill]) -> Writes:
        """Where to store each token of a pass: first the decode rows, at positions `decoded`, then the blocks."""
        first = len(decoded)
        source, row, position = [np.arange(first)], [np.arange(first) + first_row], [decoded]
        for block in blocks:
            source.append(block.source + first)
            row.append(block.row)
            position.append(block.position)
            first += block.token_ids.size
        at_source, at_row, at_position = (
            on_device(np.concatenate(part), self._m.device) for part in (source, row, position)
        )
        return at_source, at_row, at_position

    def columns_up_to(self, rows: int) -> torch.Tensor:
        """0, 1, 2 and so on, int64[rows]."""
        return self._columns[:rows] if rows <= len(self._columns) else torch.arange(rows, device=self._m.device)


def all_positions(step: Decode | None, blocks: Sequence[Prefill]) -> np.ndarray:
    """The positions of all tokens of a pass, int64[tokens], decode rows first."""
    if step is not None and not blocks:
        return step.positions
    parts = [] if step is None else [step.positions]
    for block in blocks:
        contexts, width = block.token_ids.shape
        parts.append(np.tile(np.arange(block.start, block.start + width), contexts))
    return np.concatenate(parts)


def all_token_ids(step: Decode | None, blocks: Sequence[Prefill]) -> np.ndarray:
    """All tokens of a pass, int64[tokens], decode rows first."""
    if step is not None and not blocks:
        return step.token_ids
    parts = [] if step is None else [step.token_ids]
    return np.concatenate([*parts, *(block.token_ids.reshape(-1) for block in blocks)])


def _rotary_table(body: Any, zero: torch.Tensor, head_size: int, context: int) -> torch.Tensor:
    positions = torch.arange(context, device=zero.device)[None]
    with torch.inference_mode():
        cos, sin = body.rotary_emb(zero, positions)
    half = head_size // 2
    return torch.stack((cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)), 1).to(zero.dtype)
