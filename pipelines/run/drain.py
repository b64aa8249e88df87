"""The end of a run whose pipelines were submitted one by one: first who asks, then who answers, in their order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from infra.kafka.admin import admin_client
from infra.kafka.lag import group_lags, list_groups
from infra.kafka.reading import read_topic
from pipelines.config import Config
from pipelines.inspect.submissions import Submission
from pipelines.run.submission.detached import stop
from schemas.records import ReplicaStatus
from schemas.topics import PROMPTS, REPLICAS, TRAJECTORIES, run_prefix

CHECK_EVERY_S = 2.0
IDLE_CHECKS = 3
"""So many looks in a row must find nothing under way: heartbeats tell of work a moment after it was given."""
WAITED_FOR = {"placement": PROMPTS, "score": TRAJECTORIES}
"""Who must be done with what."""


def drain(kept: Sequence[Submission], config: Config, deadline: float, note: Callable[[str], None]) -> list[str]:
    """Stop `kept`, which are in the order in which pipelines drain; the roles that are still up at `deadline`."""
    asking = [each for each in kept if each.pipeline == "prompts"]
    for each in asking:
        stop(each, deadline)
        note(f"{each.role.name} has stopped: nothing new is asked")
    quiet = 0
    while quiet < IDLE_CHECKS and time.monotonic() < deadline:
        quiet = quiet + 1 if is_idle(config) else 0
        time.sleep(CHECK_EVERY_S)
    left = []
    for each in kept:
        if quiet < IDLE_CHECKS or not stop(each, deadline):
            left += [each.role.name] if each.respawner() is not None else []
        else:
            note(f"{each.role.name} has stopped")
    return left


def is_idle(config: Config) -> bool:
    """Whether all prompts are dispatched, all replicas idle and all trajectories scored, as Kafka tells it."""
    client, run = config.kafka.client(), config.run.name
    prefix = run_prefix(run)
    with admin_client(client) as admin:
        lags = group_lags(admin, list_groups(admin, prefix))
    waited = {(f"{prefix}{pipeline}.", topic.name(run)) for pipeline, topic in WAITED_FOR.items()}
    if any(lag.lag and lag.group.startswith(group) and lag.topic == topic for lag in lags for group, topic in waited):
        return False
    last: dict[int, ReplicaStatus] = {}
    for record in read_topic(client, REPLICAS.name(run)):
        last |= {row.replica: row for row in record.rows if isinstance(row, ReplicaStatus)}
    return not any(status.running or status.waiting for status in last.values())
