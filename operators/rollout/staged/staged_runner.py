"""The runner and the KV of a group's leader: those of a whole engine, but the layers are in several processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch

from infra.transport.frames import TransportError
from infra.transport.kv_transfer import encode_parts
from operators.rollout.direct_layers import LlamaModules, all_token_ids
from operators.rollout.engine import KV
from operators.rollout.kv_rows import RowCopy
from operators.rollout.staged.pipeline import StagePipeline
from operators.rollout.staged.stage import StageModel, encode_plan
from operators.rollout.step_plan import Decode, Prefill
from schemas.records import KVManifest, PolicyVersion

PART_ROWS = 8
"""Decode rows in a part of a step: with fewer, computing a part costs as much as computing it with others."""


class StagedRunner:
    """Runs `own`, the leader's stage, then the members of `pipeline`. Raises GroupFailed when a member is lost."""

    preferred_order: np.ndarray | None = None

    def __init__(self, modules: LlamaModules, own: StageModel, pipeline: StagePipeline) -> None:
        self._modules, self._own, self._pipeline = modules, own, pipeline

    def prefill(self, blocks: Sequence[Prefill], layers: Collection[int] | None = None) -> None:
        """Compute the KV of `blocks`; with `layers` store only that of those layers."""
        if blocks:
            self._send(None, blocks, returns=False, stored=None if layers is None else sorted(layers))

    def decode(self, step: Decode, blocks: Sequence[Prefill] = ()) -> torch.Tensor:
        """Compute `blocks` and the step; returns logits [rows, vocabulary]. Stages compute parts of it in parallel."""
        parts = self._parts(step)
        hidden = []
        for number, part in enumerate(parts):
            hidden.append(self._send(part, blocks if number == 0 else (), returns=True))
        if self._pipeline.members:
            hidden = [self._own.from_bytes(self._pipeline.result()) for _ in parts]
        return self._modules.logits(hidden[0] if len(hidden) == 1 else torch.cat(hidden))

    def _parts(self, step: Decode) -> list[Decode]:
        """`step` in at most as many parts as there are stages, of at least PART_ROWS rows."""
        rows = len(step.token_ids)
        count = max(1, min(len(self._pipeline.members) + 1, rows // PART_ROWS))
        bounds = [rows * part // count for part in range(count + 1)]
        return [Decode(step.token_ids[first:end], step.positions[first:end], first) for first, end in pairwise(bounds)]

    def _send(
        self,
        step: Decode | None,
        blocks: Sequence[Prefill],
        *,
        returns: bool,
        stored: list[int] | None = None,
    ) -> torch.Tensor:
        token_ids = torch.from_numpy(all_token_ids(step, blocks)).to(self._modules.device)
        x = self._own.run(self._modules.embedding.index_select(0, token_ids), step, blocks, stored)
        if self._pipeline.members:
            self._pipeline.send_step(encode_plan(step, blocks), self._own.to_bytes(x), returns=returns, stored=stored)
        return x


class StagedKV:
    """The KV of a group's requests: `own` has that of the leader's layers, the members of `pipeline` have the rest."""

    def __init__(self, own: StageModel, pipeline: StagePipeline, version: PolicyVersion) -> None:
        self._own, self._pipeline, self._version = own, pipeline, version

    def copy(self, copies: Sequence[RowCopy]) -> None:
        """Copy between rows, in every stage."""
        if copies:
            self._own.slots.copy(copies)
            self._pipeline.copy(copies)

    def permute(self, order: np.ndarray, width: int) -> None:
        """Reorder rows, in every stage."""
        self._own.slots.permute(order, width)
        self._pipeline.permute(order, width)

    def clear(self, rows: Sequence[int]) -> None:
        """Zero rows, in every stage."""
        self._own.slots.clear(rows)
        self._pipeline.clear(rows)

    def export_row(self, row: int, tokens: int) -> KV:
        """Where the KV of a row's first `tokens` tokens can be fetched: each stage offers its part."""
        transfers = self._pipeline.transfers
        own = transfers.offer(self._version, tokens, self._own.slots.export_row(row, tokens).data)
        offers = [own, *(self._pipeline.offer(member, row, tokens) for member in self._pipeline.members)]
        parts = [offer for offer in offers if offer is not None]
        return KV(tokens, encode_parts(parts) if len(parts) == len(offers) else memoryview(b""), parts=True)

    def import_row(self, row: int, kv: KV, tokens: int) -> bool:
        """Store the first `tokens` tokens of `kv` in `row`; whether it could be used. Raises GroupFailed."""
        count = self._pipeline.order.stages[-1].end
        layout = kv.layout_tokens or kv.tokens
        if kv.parts or not layout or len(kv.data) % count:
            return False
        each = len(kv.data) // count
        layers = {layer: kv.data[layer * each : (layer + 1) * each] for layer in range(count)}
        return len(self.write_row(row, layout, min(tokens, kv.tokens), layers)) == count

    def read_row(self, row: int, tokens: int) -> dict[int, memoryview]:
        """A copy of the KV of the first `tokens` tokens of `row`, by layer; without those of members that are gone."""
        layers = dict(self._own.slots.read_row(row, tokens))
        for member in self._pipeline.members:
            manifest = self._pipeline.offer(member, row, tokens) if member.alive else None
            if manifest is not None and (data := self._fetch(manifest)) is not None and len(member.layers):
                each = len(data) // len(member.layers)
                layers |= {layer: data[i * each : (i + 1) * each] for i, layer in enumerate(member.layers)}
        return layers

    def write_row(self, row: int, layout_tokens: int, tokens: int, layers: Mapping[int, memoryview]) -> set[int]:
        """Store the first `tokens` tokens of `layers`; returns the layers that were stored. Raises GroupFailed."""
        stored = self._own.slots.write_row(row, layout_tokens, tokens, layers)
        for member in self._pipeline.members:
            if all(layer in layers for layer in member.layers):
                data = [layers[layer] for layer in member.layers]
                if self._pipeline.write(member, row, layout_tokens, tokens, data):
                    stored |= set(member.layers)
        return stored

    def _fetch(self, manifest: KVManifest) -> memoryview | None:
        try:
            return self._pipeline.transfers.fetch_now(manifest)
        except TransportError:
            return None
