"""The room that a replica reserves for trajectories which other replicas are to hand over to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class _Reservation:
    pending: set[str]
    kv: int
    expires_at: float


class Reservations:
    """Plans and their pending trajectories. A reservation expires after `expiry_s` seconds."""

    def __init__(self, expiry_s: float) -> None:
        self._expiry_s = expiry_s
        self._plans: dict[str, _Reservation] = {}
        self.plans: tuple[str, ...] = ()
        """The plans with pending trajectories; another thread may read it."""

    @property
    def requests(self) -> int:
        """Pending trajectories."""
        return sum(len(plan.pending) for plan in self._plans.values())

    @property
    def kv(self) -> int:
        """KV reserved for them, in tokens."""
        return sum(plan.kv for plan in self._plans.values())

    def grant(self, plan_id: str, trajectory_ids: Iterable[str], kv: int, now: float) -> None:
        """Reserve room for a plan."""
        self._plans[plan_id] = _Reservation(set(trajectory_ids), kv, now + self._expiry_s)
        self._update(now)

    def remove(self, trajectory_ids: Iterable[str], now: float) -> None:
        """Release the room of these trajectories: they have arrived, or were cancelled."""
        for plan in self._plans.values():
            removed = plan.pending.intersection(trajectory_ids)
            if removed:
                plan.kv -= plan.kv * len(removed) // len(plan.pending)
                plan.pending -= removed
        self._update(now)

    def expire(self, now: float) -> None:
        """Drop the reservations that have expired."""
        if self._plans:
            self._update(now)

    def _update(self, now: float) -> None:
        self._plans = {name: plan for name, plan in self._plans.items() if plan.pending and plan.expires_at > now}
        self.plans = tuple(self._plans)
