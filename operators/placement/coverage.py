"""Settled trajectories that are still outstanding: those of batches that no weight version covers yet."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from schemas.records import Settled


class Coverage:
    """Batches by number. A manifest covers its batches and all earlier ones, so a slow trainer delays new work.

    Until its batch is covered, a restart must read the Settled record of a trajectory again.
    """

    def __init__(self, covered: int = -1) -> None:
        self._uncovered: dict[int, dict[str, int]] = {}  # by batch: settled trajectories and their offsets
        self.covered = covered
        """The last batch that a manifest covers."""

    def settle(self, settled: Settled, offset: int) -> bool:
        """Record a trajectory settled at `offset`; return whether it is still outstanding."""
        if settled.batch is None or settled.batch <= self.covered:
            return False
        self._uncovered.setdefault(settled.batch, {}).setdefault(settled.trajectory_id, offset)
        return True

    def cover(self, batches: Collection[int]) -> Iterable[str]:
        """Record the `batches` of a manifest; return the trajectories that are no longer outstanding."""
        self.covered = max([self.covered, *batches])
        done = [batch for batch in self._uncovered if batch <= self.covered]
        return [name for batch in done for name in self._uncovered.pop(batch)]

    def __contains__(self, name: str) -> bool:
        return any(name in members for members in self._uncovered.values())

    def oldest_offset(self) -> int | None:
        """The lowest offset that a restart must read again; None if it needs none."""
        # Settled records are read in order, so the first member of a batch has its lowest offset.
        return min((next(iter(members.values())) for members in self._uncovered.values()), default=None)
