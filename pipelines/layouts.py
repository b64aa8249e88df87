"""The numbers of shards that a run's configuration wants, and what a change of them needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from infra.kafka.clients import SessionClients
from infra.kafka.resharding import SplitState, reshard
from infra.kafka.session_config import SessionConfig
from operators.experience.resharded_state import split_buffer_state
from operators.io.config import ShardConfig
from operators.score.score_trajectories import split_state
from pipelines.config import Config
from pipelines.sharded_sources import experience_source, score_source

_SOURCES: Mapping[str, Callable[[Config, int], ShardConfig]] = {
    "score": score_source,
    "experience": experience_source,
}


class RoleLayout(NamedTuple):
    """The number of shards of a role, and what a change of it needs."""

    shards: int
    sessions: Callable[[int, int], SessionConfig]
    split: SplitState

    def apply(self, clients: SessionClients) -> int | None:
        """Give the role `shards` shards. Returns and raises as `reshard`."""
        return reshard(self.sessions, self.shards, self.split, clients)


def layouts(config: Config) -> dict[str, RoleLayout]:
    """By role: the layout that `config` wants, of the roles whose number of shards may change in its run."""
    partitions, buffer = config.kafka.partitions, config.experience
    found = {}
    if partitions > 1:
        found["score"] = RoleLayout(config.score.shards, partial(_session, config, "score"), split_state)
    if buffer.max_shards > 1:
        split = partial(split_buffer_state, partitions=partitions, divisions=buffer.divisions)
        found["experience"] = RoleLayout(buffer.shards, partial(_session, config, "experience"), split)
    return found


def _session(config: Config, role: str, shard: int, shards: int) -> SessionConfig:
    """The session of a shard of `role` in a layout of so many shards."""
    other = replace(config, **{role: replace(getattr(config, role), shards=shards)})
    return _SOURCES[role](other, shard).session()
