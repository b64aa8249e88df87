"""Training batches."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.array_fields import Flags, Floats, Integers, TokenIds


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A packed part of global batch `batch`: part `index` of the `count` parts of its rank.

    Written by experience, read by the trainer of `rank`, which reads that partition of the batches topic. Every rank
    has as many parts; where a rank has less work its last parts are empty (n = t = 0). All sequences of a group are on
    one rank, next to each other, so that statistics of a group need no other rank.

    With n sequences of t tokens in all: token_ids, logprobs and loss_mask are [t] (prompt positions carry logprob 0 and
    mask False); lengths and prompt_lengths are [n], as are rewards, temperatures, truncated, staleness, the version
    columns and the lineage columns, which give partition and offset of each sequence in the experiences topic. Logprobs
    are of the softmax of logits / temperature, from which the tokens were drawn. `breaks` are rising positions among
    the t tokens at which the context restarts within a sequence: a token attends to none before the last break.
    """

    batch: int
    index: int
    count: int
    rank: int
    token_ids: TokenIds
    logprobs: Floats
    loss_mask: Flags
    lengths: Integers
    prompt_lengths: Integers
    rewards: Floats
    temperatures: Floats
    truncated: Flags
    trajectory_ids: tuple[str, ...]
    version_epochs: Integers
    version_numbers: Integers
    staleness: Integers
    lineage_partitions: Integers
    lineage_offsets: Integers
    breaks: Integers
