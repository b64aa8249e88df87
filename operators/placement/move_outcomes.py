"""Outcomes of planned moves: a move is reported once the outcomes of all its trajectories are known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from schemas.records import MoveOutcome

OutcomeOfMove = Literal["handed_over", "finished", "rejected", "lost"]


@dataclass(slots=True)
class _Move:
    plan_id: str
    source: int
    destination: int
    open: set[str]
    outcomes: dict[OutcomeOfMove, list[str]] = field(default_factory=dict)


class MoveOutcomes:
    """Open moves. A trajectory is in one of them at most, and its first outcome counts."""

    def __init__(self) -> None:
        self._moves: dict[str, _Move] = {}
        self._ended: list[_Move] = []

    def plan(self, plan_id: str, source: int, destination: int, names: Iterable[str]) -> None:
        """Record a planned move of trajectories `names`."""
        move = _Move(plan_id, source, destination, set(names))
        self._moves |= dict.fromkeys(move.open, move)

    def record(self, name: str, outcome: OutcomeOfMove) -> None:
        """Record the outcome of a trajectory, if it is in an open move."""
        move = self._moves.pop(name, None)
        if move is None:
            return
        move.open.remove(name)
        move.outcomes.setdefault(outcome, []).append(name)
        if not move.open:
            self._ended.append(move)

    def take_ended(self, now: int) -> list[MoveOutcome]:
        """The moves completed since the last call."""
        ended, self._ended = self._ended, []
        return [
            MoveOutcome(
                plan_id=move.plan_id,
                source=move.source,
                destination=move.destination,
                handed_over=tuple(move.outcomes.get("handed_over", ())),
                finished=tuple(move.outcomes.get("finished", ())),
                rejected=tuple(move.outcomes.get("rejected", ())),
                lost=tuple(move.outcomes.get("lost", ())),
                ended_at=now,
            )
            for move in ended
        ]
