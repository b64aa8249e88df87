"""Cancels that placement has to write: which trajectories a replica has to stop, or to stop waiting for."""

from __future__ import annotations

from operators.placement.work_table import Owner
from schemas.records import Cancel


class PendingCancels:
    """Trajectories and leases to cancel, by replica."""

    def __init__(self) -> None:
        self._leases: dict[Owner, dict[str, int]] = {}

    def add(self, owner: Owner, name: str, lease: int) -> None:
        """Cancel trajectory `name` at `owner` up to `lease`; lease 0 only ends the wait for a hand-over."""
        leases = self._leases.setdefault(owner, {})
        leases[name] = max(lease, leases.get(name, 0))

    def take(self) -> list[Cancel]:
        """The Cancel records to write; the table is empty afterwards."""
        cancels, self._leases = self._leases, {}
        return [Cancel(tuple(leases), tuple(leases.values()), *owner) for owner, leases in cancels.items()]
