"""Drain a run whose pipelines were submitted separately: stop prompts, wait until the run is idle, stop the rest."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from infra.files import write_atomically
from infra.kafka.admin import admin_client
from infra.kafka.lag import group_lags, list_groups
from infra.kafka.readiness import ClientError
from infra.kafka.topic_reader import read_rows
from pipelines.config import Config
from pipelines.inspect.audit.audit_run import audit
from pipelines.inspect.audit.result import findings_text
from pipelines.inspect.log.manifests import final_version
from pipelines.inspect.log.pauses import is_paused
from pipelines.inspect.run_files import AUDIT_FILE
from pipelines.inspect.run_folders import run_command
from pipelines.inspect.submissions import Submission
from pipelines.run.submission.detached import stop
from schemas.records import ReplicaStatus
from schemas.topics import PROMPTS, REPLICAS, TRAJECTORIES, run_prefix

CHECK_EVERY_S = 2.0
IDLE_CHECKS = 3
"""The run must be idle in this many consecutive checks, because heartbeats report new work with a delay."""
CONSUMED = {"placement": PROMPTS, "score": TRAJECTORIES}
"""Topics that must have no lag, by the pipeline that consumes them."""


def drain(active: Sequence[Submission], config: Config, deadline: float, note: Callable[[str], None]) -> list[str]:
    """Stop `active`, which are in drain order. Returns the roles that still run at `deadline`.

    The prompts that wait in a paused run stay in the log; placement assigns them after the next start.
    """
    sources = [each for each in active if each.pipeline == "prompts"]
    for each in sources:
        stop(each, deadline)
        note(f"{each.role.name} has stopped: no new prompts are drawn")
    if is_paused(config.kafka.client(), config.run.name):
        note("the run is paused: the prompts that wait stay in the log until it is resumed and its pause has ended")
    idle_checks = 0
    while idle_checks < IDLE_CHECKS and time.monotonic() < deadline:
        idle_checks = idle_checks + 1 if is_idle(config) else 0
        time.sleep(CHECK_EVERY_S)
    left = []
    for each in active:
        if idle_checks < IDLE_CHECKS or not stop(each, deadline):
            left += [each.role.name] if each.respawner() is not None else []
        else:
            note(f"{each.role.name} has stopped")
    return left


def is_idle(config: Config) -> bool:
    """Whether all prompts are dispatched, all replicas idle and all trajectories scored, according to Kafka.

    The prompts of a run that is paused, or has trained all its steps, are not dispatched, so they are not counted:
    after the last step what is outstanding will never be trained.
    """
    client, run = config.kafka.client(), config.run.name
    prefix = run_prefix(run)
    with admin_client(client) as admin:
        lags = group_lags(admin, list_groups(admin, prefix))
    wanted = {"score": TRAJECTORIES} if is_paused(client, run) or final_version(client, run) is not None else CONSUMED
    for pipeline, topic in wanted.items():
        own = [lag for lag in lags if lag.group.startswith(f"{prefix}{pipeline}.") and lag.topic == topic.name(run)]
        behind: dict[int, int] = {}
        for lag in own:  # the least of a partition: a shard that had it before may have left an offset
            behind[lag.partition] = min(lag.lag, behind.get(lag.partition, lag.lag))
        if any(behind.values()):
            return False
    last = {status.replica: status for status in read_rows(client, REPLICAS.name(run), ReplicaStatus)}
    return not any(status.running or status.waiting for status in last.values())


def final_audit(folder: Path, config: Config) -> tuple[bool, str]:
    """Audit the run in `folder`, whose roles have ended, and keep the result where `laminar run` does.

    Returns whether nothing speaks against the run, and the result in words.
    """
    client, timeout_s = config.kafka.client(), config.kafka.transaction_timeout_s
    try:
        found = audit(client, config.run.name, ended=True, transaction_timeout_s=timeout_s)
    except (ClientError, RuntimeError) as error:
        return True, f"not audited: {error}; `{run_command(folder, 'runs audit', '--ended')}` repeats it"
    write_atomically(folder / AUDIT_FILE, json.dumps(found.to_json(), indent=1))
    if found.passed:
        return True, "the audit passed: no trajectory lost or trained twice"
    lists = run_command(folder, "runs audit", "--ended")
    return False, f"the audit FAILED: {findings_text(found.to_json())}; `{lists}` lists them"
