"""Which settled trajectories still count as outstanding: those of batches that no weight version covers yet."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from schemas.records import Settled


class Coverage:
    """Batches by number; a manifest covers the batches it names and all before them, so a slow trainer holds work back.

    A batched trajectory must be read again after a restart until its batch is covered.
    """

    def __init__(self, covered: int = -1) -> None:
        self._uncovered: dict[int, dict[str, int]] = {}  # batch -> settled trajectories and their offsets
        self.covered = covered
        """The last batch that a manifest covers."""

    def settle(self, settled: Settled, offset: int) -> bool:
        """Whether the trajectory settled at `offset` still counts."""
        if settled.batch is None or settled.batch <= self.covered:
            return False
        self._uncovered.setdefault(settled.batch, {}).setdefault(settled.trajectory_id, offset)
        return True

    def cover(self, batches: Collection[int]) -> Iterable[str]:
        """A manifest names `batches`; the trajectories that no longer count."""
        self.covered = max([self.covered, *batches])
        done = [batch for batch in self._uncovered if batch <= self.covered]
        return [name for batch in done for name in self._uncovered.pop(batch)]

    def __contains__(self, name: str) -> bool:
        return any(name in members for members in self._uncovered.values())

    def oldest_offset(self) -> int | None:
        """The lowest offset that a restart must read again; None if it needs none."""
        # They are read in the order in which they were settled: a batch's first member has its lowest offset.
        return min((next(iter(members.values())) for members in self._uncovered.values()), default=None)
