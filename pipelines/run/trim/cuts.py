"""Up to which offset a partition may go, and what stands before it: records, bytes, and a digest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from infra.kafka.properties import ClientProperties
from infra.kafka.reading import StoredRecord, read_topic, undecoded
from pipelines.inspect.audit.decode import DecodedRecord, decode_for_audit
from schemas.codec import UndecodableRecord
from schemas.identity import TrajectoryKey, parse_trajectory_id
from schemas.records import MicroBatch, Prompt, Settled, WeightVersion


@dataclass(frozen=True)
class Cut:
    """The records before `offset` go: so many of them and of bytes, with the BLAKE3 of their keys and values.

    `batch` is the number of the first batch that stays, where the partition holds batches and one stays.
    """

    begin: int
    offset: int
    records: int
    size: int
    digest: str
    held_by: str
    """What keeps the next record."""
    batch: int | None = None


Stays = Callable[[Any], str | None]
"""Why a record stays, and all after it; None: it may go."""


def find_cut(
    client: ClientProperties, topic: str, partition: int, begin: int, limit: int, held_by: str, stays: Stays
) -> Cut:
    """The first record of a partition from `begin` on that `stays`, or `limit`, which is `held_by`.

    What cannot be decoded may go: no reader takes it, and its dead letter has it whole.
    """
    digest, records, size, batch = blake3(), 0, 0, None
    offset = max(begin, limit)
    if begin < limit:
        for record in read_topic(
            client, topic, start={partition: begin}, partitions=[partition], until={partition: limit}, decoder=undecoded
        ):
            value = record.rows[0]
            rows = list(_rows(record, value))
            if why := next(filter(None, map(stays, rows)), None):
                offset, held_by = record.offset, why
                batch = next((row.batch for row in rows if isinstance(row, MicroBatch)), None)
                break
            for part in (record.key, value):
                digest.update(len(part or b"").to_bytes(8, "little") + (part or b""))
            records, size = records + 1, size + record.size
    return Cut(begin, offset, records, size, digest.hexdigest(), held_by, batch)


def stays_of_trajectories(is_closed: Callable[[TrajectoryKey], bool], last_batch: int) -> Stays:
    """What names a trajectory that has not ended, or a batch after `last_batch`."""

    def stays(row: Any) -> str | None:
        if isinstance(row, MicroBatch) and row.batch > last_batch:
            return f"batch {row.batch}"
        return next((f"trajectory {name}" for name, key in _keys(row) if not is_closed(key)), None)

    return stays


def stays_of_manifests(first_batch: int, version: Any) -> Stays:
    """The manifest of `version`, and what names batches from `first_batch` on."""

    def stays(row: Any) -> str | None:
        if isinstance(row, WeightVersion) and (row.version == version or max(row.batches, default=-1) >= first_batch):
            return f"the manifest of version {row.version}"
        return None

    return stays


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
