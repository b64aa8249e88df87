"""Context parallelism by DeepSpeed-Ulysses (arXiv 2309.14509), for sequences whose activations do not fit one rank.

The ranks of a context group train the same sequences, each a slice of the packed tokens. All operations of a
transformer but attention are per token. Before attention the group exchanges slices of tokens for heads: each rank then
has all tokens of its share of the heads, and attention is the usual one; afterwards it exchanges them back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from operators.trainer.ranks import Ranks


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """This process as rank `rank` of `count` that train the same sequences; `group` is None for a single one."""

    rank: int = 0
    count: int = 1
    group: dist.ProcessGroup | None = None

    def gather_bytes(self, own: bytes) -> list[bytes]:
        """Each rank's `own`, in rank order. A collective."""
        if self.count == 1:
            return [own]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor([len(own)]), group=self.group)
        padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else padded[:0]
        found = [torch.empty_like(padded) for _ in range(self.count)]
        dist.all_gather(found, padded, group=self.group)
        return [each[: int(size)].numpy().tobytes() for each, size in zip(found, sizes, strict=True)]


WHOLE = ContextGroup()


def open_context(ranks: Ranks) -> ContextGroup:
    """The context group of this rank: `ranks.context` consecutive ranks. A collective: every rank must call it."""
    size = ranks.context
    if size == 1:
        return WHOLE
    group = ranks.open_group([range(first, first + size) for first in range(0, ranks.count, size)])
    return ContextGroup(ranks.rank % size, size, group)


def check_heads(config: Any, count: int) -> None:
    """Raise ValueError unless the heads of a model with `config` can be divided by `count` ranks."""
    heads = config.num_attention_heads
    of_keys = getattr(config, "num_key_value_heads", None) or heads
    if heads % count or (of_keys % count and count % of_keys):
        raise ValueError(
            f"trainer.context_ranks is {count}, but the model has {heads} attention heads and {of_keys} key-value "
            "heads: context_ranks must divide the first, and divide the second or be a multiple of it"
        )


class ContextSlice(NamedTuple):
    """A rank's slice of `tokens` packed tokens: as many on every rank, the last ones filled up with padding."""

    context: ContextGroup
    tokens: int

    @property
    def length(self) -> int:
        """The tokens of each slice, padding included."""
        return -(-self.tokens // self.context.count)

    @property
    def begin(self) -> int:
        """The first token of this rank's slice."""
        return self.length * self.context.rank

    def local(self, tokens: Tensor) -> Tensor:
        """This rank's slice of `tokens` int64[1, tokens]; padding is 0."""
        own = tokens[:, self.begin : self.begin + self.length]
        return nn.functional.pad(own, (0, self.length - own.shape[1]))

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange slices [1, heads, length, d] for heads [1, heads / ranks, tokens, d]."""
        count = self.context.count
        if key.shape[1] % count:  # fewer heads of keys than ranks: several ranks have the same
            copies = count // key.shape[1]
            key, value = (each.repeat_interleave(copies, 1) for each in (key, value))
        # One exchange for all three: collectives have the same order on every rank, also in the backward pass.
        parts = [each.squeeze(0).transpose(0, 1).unflatten(1, (count, -1)) for each in (query, key, value)]
        exchanged = self._exchange(torch.cat(parts, 2).transpose(0, 1))
        tokens = exchanged.flatten(0, 1)[: self.tokens]
        queries, keys, values = tokens.split([part.shape[2] for part in parts], 1)
        return queries.transpose(0, 1)[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

    def to_tokens(self, output: Tensor) -> Tensor:
        """Exchange heads [tokens, heads / ranks, d] for this rank's slice [length, heads, d]."""
        count = self.context.count
        padded = nn.functional.pad(output, (0, 0, 0, 0, 0, self.length * count - self.tokens))
        return self._exchange(padded.unflatten(0, (count, -1))).transpose(0, 1).flatten(1, 2)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Send part r of `parts` [ranks, …] to rank r: the result has the part of each rank for this one."""
        exchanged: Tensor = _Exchange.apply(parts.contiguous(), self.context.group)
        return exchanged


class PredictorCounts(NamedTuple):
    """How many predictors each rank of a context group has, in order."""

    context: ContextGroup
    counts: tuple[int, ...]

    def gather(self, own: Tensor) -> Tensor:
        """The values of all predictors of the group, float[m], of which `own` are this rank's.

        Each rank computes the whole loss from them, and its backward pass takes the gradient of its own.
        """
        gathered: Tensor = _Gather.apply(own, self) if sum(self.counts) else own
        return gathered


def counts_in_slices(predictors: np.ndarray, part: ContextSlice) -> PredictorCounts:
    """The number of `predictors` int64[m], ascending positions of packed tokens, in each rank's slice."""
    counts = np.bincount(predictors // part.length, minlength=part.context.count)
    return PredictorCounts(part.context, tuple(counts.tolist()))


class _Exchange(torch.autograd.Function):
    """all_to_all with equal parts, which is its own inverse."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradient.contiguous(), ctx.group), None


def _all_to_all(parts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    result = torch.empty_like(parts)
    dist.all_to_all_single(result, parts, group=group)
    return result


class _Gather(torch.autograd.Function):
    """all_gather of a loss that every rank computes: the gradient is that of this rank's own values."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, of: PredictorCounts) -> Tensor:
        ctx.begin, ctx.count = sum(of.counts[: of.context.rank]), len(own)
        padded = nn.functional.pad(own, (0, max(of.counts) - len(own)))
        gathered = [torch.empty_like(padded) for _ in of.counts]
        dist.all_gather(gathered, padded, group=of.context.group)
        return torch.cat([each[:count] for each, count in zip(gathered, of.counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[ctx.begin : ctx.begin + ctx.count], None
