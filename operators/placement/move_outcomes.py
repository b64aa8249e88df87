"""What becomes of planned moves: each move is told of once that is known of all its trajectories."""

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
    """Moves under way. A trajectory is in one of them at most, and the first that is known of it counts."""

    def __init__(self) -> None:
        self._moves: dict[str, _Move] = {}
        self._ended: list[_Move] = []

    def plan(self, plan_id: str, source: int, destination: int, names: Iterable[str]) -> None:
        """Trajectories `names` are to go from one replica to another."""
        move = _Move(plan_id, source, destination, set(names))
        self._moves |= dict.fromkeys(move.open, move)

    def record(self, name: str, outcome: OutcomeOfMove) -> None:
        """What has become of a trajectory, if it was to move."""
        move = self._moves.pop(name, None)
        if move is None:
            return
        move.open.remove(name)
        move.outcomes.setdefault(outcome, []).append(name)
        if not move.open:
            self._ended.append(move)

    def take_ended(self, now: int) -> list[MoveOutcome]:
        """The moves of which all is known since this was asked last."""
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
