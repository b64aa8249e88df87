"""Making a trim: the checkpoint is copied, then the trim point is written, then records are deleted. Killed between two
of these it is repeated by the next trim; the audit counts alike after each.
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
_ALL = 1 << 30
"""So many checkpoints of trim points are kept."""


def execute(client: ClientProperties, plan: TrimPlan, folder: Path) -> None:
    """Make the trim of `plan`, of the run in `folder`.

    Raises CheckpointError where the checkpoint is damaged or cannot be written, DeliveryFailed and KafkaError.
    """
    if plan.checkpoint is not None:
        keep_checkpoint(plan.checkpoint, folder / plan.trim_point.checkpoint)
    name = TRIM_POINTS.name(plan.run)
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(name, 1, config={"cleanup.policy": "delete", "retention.ms": "-1"})])
        value, headers = encode(plan.trim_point)
        with BoundedProducer(client) as producer:
            producer.send(name, value, key=str(plan.trim_point.number).encode(), headers=headers)
            producer.flush(_DELIVER_S)
        wanted = {
            (run_prefix(plan.run) + place.short_name, place.partition): cut.offset
            for place, cut in plan.cuts.items()
            if cut.offset > cut.begin
        }
        delete_records(admin, wanted)


def keep_checkpoint(source: StorageFolder, target: Path) -> None:
    """Copy the checkpoint `source` to `target`, whole or not at all. Raises CheckpointError."""
    from operators.trainer.checkpoint import read_checkpoint, write_checkpoint  # here: it imports torch

    if not target.exists():
        state, position = read_checkpoint(source)
        write_checkpoint(target.parent, state, position, keep=_ALL)
