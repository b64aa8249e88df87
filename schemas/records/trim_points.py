"""Where the log of a run begins after a trim, and what the deleted records held."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.records.versions import PolicyVersion


@dataclass(frozen=True, slots=True)
class TrimPoint:
    """The log of a run begins here.

    Written by `laminar runs trim` before it deletes records; read by the audit, replay and lineage.

    Every trajectory of one of `purposes` whose number is below the one in `closed_below` has ended, and is included in
    `counts`: the audit's figures, named by `count_names`. Batches up to `batch` were trained into `version`, whose
    checkpoint is kept in the run's folder as `checkpoint` ("": the run has none). In each of `partitions`
    ("topic:partition") the records before `offsets` are deleted: `record_counts` records of `byte_counts` bytes, with
    the BLAKE3 of their keys and values in `digests`. Trim points are numbered from 1; the figures of each include those
    of its predecessors.
    """

    number: int
    version: PolicyVersion
    batch: int
    checkpoint: str
    purposes: tuple[str, ...]
    closed_below: tuple[int, ...]
    count_names: tuple[str, ...]
    counts: tuple[int, ...]
    partitions: tuple[str, ...]
    offsets: tuple[int, ...]
    record_counts: tuple[int, ...]
    byte_counts: tuple[int, ...]
    digests: tuple[str, ...]
    trimmed_at: int

    def first_offset(self, topic: str, partition: int) -> int:
        """The first offset left in a partition of the topic with short name `topic`; 0 if it was not trimmed."""
        return dict(zip(self.partitions, self.offsets, strict=True)).get(f"{topic}:{partition}", 0)
