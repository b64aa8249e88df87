"""The offset up to which a partition may be deleted, and the records, bytes and digest before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from infra.kafka.properties import ClientProperties
from infra.kafka.topic_reader import StoredRecord, raw_decoder, read_partition
from pipelines.inspect.audit.decode import DecodedRecord, decode_for_audit
from schemas.codec import UndecodableRecord
from schemas.identity import TrajectoryKey, parse_trajectory_id
from schemas.records import MicroBatch, Prompt, Settled, WeightVersion


@dataclass(frozen=True)
class Cut:
    """The records from `begin` to `offset` are deleted: their number, `size` in bytes, and BLAKE3 of keys and values.

    `batch` is the number of the first retained batch, if the partition holds batches and one is retained.
    """

    begin: int
    offset: int
    records: int
    size: int
    digest: str
    held_by: str
    """Why the next record is retained."""
    batch: int | None = None


RetainReason = Callable[[Any], str | None]
"""Why a record and all after it are retained; None: it may be deleted."""


def find_cut(
    client: ClientProperties,
    topic: str,
    partition: int,
    begin: int,
    limit: int,
    held_by: str,
    retain_reason: RetainReason,
) -> Cut:
    """The cut of a partition: from `begin` to its first retained record, or to `limit`, with the reason `held_by`.

    Undecodable records may be deleted: no reader uses them, and their dead letters hold copies.
    """
    digest, records, size, batch = blake3(), 0, 0, None
    offset = max(begin, limit)
    if begin < limit:
        for record in read_partition(client, topic, partition, begin, limit, raw_decoder):
            value = record.rows[0]
            rows = list(_rows(record, value))
            if reason := next(filter(None, map(retain_reason, rows)), None):
                offset, held_by = record.offset, reason
                batch = next((row.batch for row in rows if isinstance(row, MicroBatch)), None)
                break
            for part in (record.key, value):
                digest.update(len(part or b"").to_bytes(8, "little") + (part or b""))
            records, size = records + 1, size + record.size
    return Cut(begin, offset, records, size, digest.hexdigest(), held_by, batch)


def retain_trajectories(is_closed: Callable[[TrajectoryKey], bool], last_batch: int) -> RetainReason:
    """Retain records that name an active trajectory or a batch after `last_batch`."""

    def retain_reason(row: Any) -> str | None:
        if isinstance(row, MicroBatch) and row.batch > last_batch:
            return f"batch {row.batch}"
        return next((f"trajectory {name}" for name, key in _keys(row) if not is_closed(key)), None)

    return retain_reason


def retain_manifests(first_batch: int, version: Any) -> RetainReason:
    """Retain the manifest of `version` and manifests that name batches from `first_batch` on."""

    def retain_reason(row: Any) -> str | None:
        if isinstance(row, WeightVersion) and (row.version == version or max(row.batches, default=-1) >= first_batch):
            return f"the manifest of version {row.version}"
        return None

    return retain_reason


def _rows(record: StoredRecord, value: bytes | None) -> Iterator[Any]:
    try:
        yield from decode_for_audit(value, record.headers)
    except UndecodableRecord:
        return


def _keys(row: Any) -> Iterator[tuple[str, TrajectoryKey]]:
    match row:
        case DecodedRecord():
            yield f"{row.key.purpose[0]}{row.key.number}.{row.key.member}", row.key
        case Settled():
            yield row.trajectory_id, parse_trajectory_id(row.trajectory_id)
        case MicroBatch():
            yield from ((name, parse_trajectory_id(name)) for name in row.trajectory_ids)
        case Prompt():
            yield row.prompt_id, TrajectoryKey(row.purpose, row.number, 0)
