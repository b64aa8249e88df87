"""The room that a replica keeps for trajectories which others are to hand over to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class _Reserved:
    waited_for: set[str]
    kv: int
    until: float


class Reservations:
    """Plans and the trajectories still waited for, each plan for `patience_s` seconds at most."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._plans: dict[str, _Reserved] = {}
        self.plans: tuple[str, ...] = ()
        """The plans with something to come; another thread may read it."""

    @property
    def requests(self) -> int:
        """Trajectories still to come."""
        return sum(len(plan.waited_for) for plan in self._plans.values())

    @property
    def kv(self) -> int:
        """KV in tokens kept for them."""
        return sum(plan.kv for plan in self._plans.values())

    def grant(self, plan_id: str, trajectory_ids: Iterable[str], kv: int, now: float) -> None:
        """Keep room for a plan."""
        self._plans[plan_id] = _Reserved(set(trajectory_ids), kv, now + self._patience_s)
        self._tidy(now)

    def settle(self, trajectory_ids: Iterable[str], now: float) -> None:
        """These have come, or will not."""
        for plan in self._plans.values():
            here = plan.waited_for.intersection(trajectory_ids)
            if here:
                plan.kv -= plan.kv * len(here) // len(plan.waited_for)
                plan.waited_for -= here
        self._tidy(now)

    def expire(self, now: float) -> None:
        """Wait no longer for what does not come."""
        if self._plans:
            self._tidy(now)

    def _tidy(self, now: float) -> None:
        self._plans = {name: plan for name, plan in self._plans.items() if plan.waited_for and plan.until > now}
        self.plans = tuple(self._plans)
