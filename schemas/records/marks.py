"""What a trim of a run's log leaves behind: where its history begins now, and what stood before."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.records.versions import PolicyVersion


@dataclass(frozen=True, slots=True)
class TrimMark:
    """The log of a run begins here. Made by `laminar runs trim` before it deletes anything, eaten by the audit, replay
    and lineage.

    Every trajectory of one of `purposes` whose number is below the one in `closed_below` has ended, and is counted in
    `counts` (by `figures`: the audit's numbers of all of them). Batches up to `batch` made `version`, whose checkpoint
    is kept in the run's folder as `checkpoint` ("": the run has none). Of each of `places` ("noun:partition") the
    records before `offsets` go: so many `records` of so many `sizes` bytes, with the BLAKE3 of their keys and values in
    `digests`. Marks are numbered from 1; each counts all that those before it do.
    """

    number: int
    version: PolicyVersion
    batch: int
    checkpoint: str
    purposes: tuple[str, ...]
    closed_below: tuple[int, ...]
    figures: tuple[str, ...]
    counts: tuple[int, ...]
    places: tuple[str, ...]
    offsets: tuple[int, ...]
    records: tuple[int, ...]
    sizes: tuple[int, ...]
    digests: tuple[str, ...]
    made_at: int

    def offset_of(self, noun: str, partition: int) -> int:
        """Where the log of a partition begins; 0 for one that was not trimmed."""
        return dict(zip(self.places, self.offsets, strict=True)).get(f"{noun}:{partition}", 0)
