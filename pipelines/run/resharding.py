"""Gives a role of a run the number of shards that its configuration now has, before it starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from infra.kafka.clients import KafkaClients
from infra.kafka.resharding import reshard
from infra.kafka.session import SessionLost
from operators.score.score_trajectories import split_state
from pipelines.config import Config
from pipelines.shards import score_sessions

PAUSES_S = (0.5, 2.0, 5.0)
"""Before a repetition, while Kafka is unavailable or another process starts the same role."""


def reshard_score(config: Config, note: Callable[[str], None]) -> None:
    """Give score `score.shards` shards; `note` receives a line if that is a change. Raises as `reshard`."""
    if config.kafka.partitions == 1:
        return
    config = replace(config, kafka=config.kafka.for_role("score"))
    shards, clients = config.score.shards, KafkaClients(config.kafka.client())
    for pause_s in (*PAUSES_S, None):
        try:
            before = reshard(score_sessions(config), shards, split_state, clients)
            break
        except SessionLost as lost:
            if pause_s is None:
                raise
            note(f"the shards of score are read again in {pause_s:g} s: {lost}")
            time.sleep(pause_s)
    if before is not None:
        note(f"score has {shards} shards from here on; it had {before}")
