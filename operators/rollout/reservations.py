"""The room that a replica reserves for trajectories which other replicas are to hand over to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from operators.rollout.engine import EngineStatus
from schemas.records import Reserve


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

    def grant(self, order: Reserve, held: int, status: EngineStatus, now: float) -> str:
        """Reserve the room that `order` requests at an engine with `held` requests; returns why not, or ""."""
        requests = held + self.requests + len(order.trajectory_ids)
        kv = status.kv_used + self.kv + order.kv_tokens
        if requests > status.capacity or kv > status.kv_capacity:
            return f"{requests} requests with {kv} KV tokens exceed {status.capacity} and {status.kv_capacity}"
        self._plans[order.plan_id] = _Reservation(set(order.trajectory_ids), order.kv_tokens, now + self._expiry_s)
        self._update(now)
        return ""

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
