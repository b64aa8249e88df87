"""Executes a trim: copies the checkpoint, writes the trim point, deletes records. If it is killed between two of these,
the next trim repeats it; the audit's counts are the same after each step.
"""

from __future__ import annotations

from pathlib import Path

from infra.kafka.admin import TopicSpec, admin_client, create_topics, delete_records
from infra.kafka.producer import BoundedProducer
from infra.kafka.properties import ClientProperties
from infra.storage import StorageFolder
from pipelines.run.trim.plan import TrimPlan
from schemas.codec import encode
from schemas.topics import TRIM_POINTS, run_prefix

_DELIVER_S = 60.0


def execute(client: ClientProperties, plan: TrimPlan, folder: Path) -> None:
    """Execute `plan` for the run in `folder`.

    Raises CheckpointError where the checkpoint is damaged or cannot be written, DeliveryFailed and KafkaError.
    """
    if plan.checkpoint is not None:
        copy_checkpoint(plan.checkpoint, folder / plan.trim_point.checkpoint)
    name = TRIM_POINTS.name(plan.run)
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(name, 1, config={"cleanup.policy": "delete", "retention.ms": "-1"})])
        value, headers = encode(plan.trim_point)
        with BoundedProducer(client) as producer:
            producer.send(name, value, key=str(plan.trim_point.number).encode(), headers=headers)
            producer.flush(_DELIVER_S)
        offsets = {
            (run_prefix(plan.run) + place.short_name, place.partition): cut.offset
            for place, cut in plan.cuts.items()
            if cut.offset > cut.begin
        }
        delete_records(admin, offsets)


def copy_checkpoint(source: StorageFolder, target: Path) -> None:
    """Copy the checkpoint `source` to `target` atomically. Raises CheckpointError."""
    from operators.trainer import checkpoint  # deferred: imports torch

    if not target.exists():
        checkpoint.copy_checkpoint(source, target)
