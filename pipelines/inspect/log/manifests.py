"""The weight versions of a run, from the manifests in its relay topic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import UnknownTopic
from infra.kafka.topic_reader import StoredRecord, decode_stored, last_records, raw_decoder, read_topic
from schemas.codec import record_type, reject_old_release
from schemas.records import PolicyVersion, WeightVersion
from schemas.topics import RELAY

NEWEST_RECORDS = 8
"""The newest manifest is among so many records of its topic; those of a large model take milliseconds each."""


def final_version(client: ClientProperties, run: str) -> PolicyVersion | None:
    """The newest weight version of `run`, if the trainer has reached its goal with it: it needs no more batches."""
    try:
        newest = [row for record in last_records(client, RELAY.name(run), NEWEST_RECORDS) for row in record.rows]
    except UnknownTopic:
        return None
    last = max((row for row in newest if isinstance(row, WeightVersion)), key=lambda row: row.version, default=None)
    return last.version if last is not None and last.final else None


class Manifests(Mapping[PolicyVersion, WeightVersion]):
    """Manifests by version, oldest first. Each is decoded on access, because a large model's takes milliseconds.

    Raises OldRelease if there is none, but a record of release 0.1.0.
    """

    def __init__(self, client: ClientProperties, run: str) -> None:
        kind, found, others = record_type(WeightVersion).schema, {}, dict[str, StoredRecord]()
        for record in read_topic(client, RELAY.name(run), decoder=raw_decoder):
            if record.schema != kind:
                others[str(record.schema)] = record
            elif (version := _version_of(record)) is not None:
                found[version] = record
        if not found:
            for record in others.values():
                reject_old_release(record.headers)
        self._records = dict(sorted(found.items()))

    def __getitem__(self, version: PolicyVersion) -> WeightVersion:
        """Raises KeyError, and RuntimeError if the record cannot be decoded."""
        (record,) = decode_stored([self._records[version]])
        if record.error is not None:
            raise RuntimeError(f"the manifest of {version} at offset {record.offset} cannot be decoded: {record.error}")
        manifest: WeightVersion = record.rows[0]
        return manifest

    def readable(self) -> list[WeightVersion]:
        """All manifests that can be decoded."""
        return [row for record in decode_stored(self._records.values()) for row in record.rows]

    def __iter__(self) -> Iterator[PolicyVersion]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)


def ancestors(
    manifests: Mapping[PolicyVersion, WeightVersion], version: PolicyVersion, depth: int | None
) -> Iterator[tuple[WeightVersion, WeightVersion | None]]:
    """The manifests of `version` and its ancestors, each with its parent's: `depth` of them, or all."""
    at: PolicyVersion | None = version
    for _ in range(len(manifests) if depth is None else depth):
        if at is None or at not in manifests:
            return
        manifest = manifests[at]
        at = manifest.parent
        yield manifest, None if at is None else manifests.get(at)


def _version_of(record: StoredRecord) -> PolicyVersion | None:
    """The version in the record's key; None if it has none."""
    try:
        return PolicyVersion.parse((record.key or b"").decode())
    except ValueError:
        return None
