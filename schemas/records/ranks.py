"""The rendezvous of the trainer's ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankAddress:
    """Where the trainer's ranks meet: the store that the present start of rank 0 has opened at `host` and `port`.

    Written by rank 0, read by the other ranks; the last one in the log is valid. `token` names this start in the store.
    `ranks` and `shard_ranks` are those of rank 0's configuration, `model` is the BLAKE3 of its model's tensor names,
    dtypes and shapes: a rank with others does not register.
    """

    host: str
    port: int
    token: str
    ranks: int
    shard_ranks: int
    model: str
    written_at: int
