"""The audit of a simulated run: the same fold as `laminar runs audit`, over the simulated topics."""

from __future__ import annotations

from infra.kafka.topic_reader import StoredRecord
from infra.simulation.cluster import Place, SimulatedCluster
from pipelines.inspect.audit.audit_run import READ_ORDER, Snapshot, add_record
from pipelines.inspect.audit.decode import decode_for_audit
from pipelines.inspect.audit.fold import AuditFold
from pipelines.inspect.audit.result import Audit
from schemas.topics import group_name


def audit_cluster(cluster: SimulatedCluster, run: str, shards: int) -> Audit:
    """The audit of run `run`, whose buffer has `shards` shards."""
    groups = {"score": 1, "experience": shards, "evaluation": 1}
    committed = {
        pipeline: {
            (place.topic, place.partition): offset
            for shard in range(count)
            for place, offset in cluster.committed_offsets(group_name(run, pipeline, shard)).items()
        }
        for pipeline, count in groups.items()
    }
    fold, snapshot = AuditFold(), Snapshot({}, frozenset(), committed)
    for topic in READ_ORDER:
        name = topic.name(run)
        for partition in cluster.partitions_of(name):
            for offset, message in cluster.log(Place(name, partition)).fetch(0, committed=True):
                rows = tuple(decode_for_audit(message.value, message.headers))
                columns = message.timestamp, message.key, message.headers, 0, rows, None
                add_record(fold, StoredRecord(name, partition, offset, *columns), snapshot)
    return fold.audit()
