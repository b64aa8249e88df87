"""Gives the roles of a run the numbers of shards that its configuration now has, before they start."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from infra.kafka.clients import KafkaClients
from infra.kafka.run_release import use_release
from infra.kafka.session import SessionLost
from pipelines.config import Config
from pipelines.layouts import layouts

PAUSES_S = (0.5, 2.0, 5.0)
"""Before a repetition, while Kafka is unavailable or another process starts the same role."""


def reshard_role(config: Config, role: str, note: Callable[[str], None]) -> None:
    """Give `role` the shards of `config`; `note` receives a line if that is a change.

    Raises as `reshard`, and NewerRelease for a run whose records this release cannot read.
    """
    config = replace(config, kafka=config.kafka.for_role(role))
    if (layout := layouts(config).get(role)) is None:
        return
    for pause_s in (*PAUSES_S, None):
        try:
            use_release(config.kafka.client(), config.run.name)
            before = layout.apply(KafkaClients(config.kafka.client()))
            break
        except SessionLost as lost:
            if pause_s is None:
                raise
            note(f"the shards of {role} are read again in {pause_s:g} s: {lost}")
            time.sleep(pause_s)
    if before is not None:
        note(f"{role} has {layout.shards} shards from here on; it had {before}")


def reshard_roles(config: Config, note: Callable[[str], None]) -> None:
    """Give all roles the shards of `config`. Raises as `reshard`."""
    for role in layouts(config):
        reshard_role(config, role, note)
