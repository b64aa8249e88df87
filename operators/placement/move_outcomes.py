"""What becomes of planned moves: each move is told of once that is known of all its trajectories."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from schemas.records import MoveOutcome

OutcomeOfMove = Literal["made", "finished", "refused", "lost"]


@dataclass(slots=True)
class _Move:
    plan_id: str
    source: int
    destination: int
    open: set[str]
    fates: dict[OutcomeOfMove, list[str]] = field(default_factory=dict)


class MoveOutcomes:
    """Moves under way. A trajectory is in one of them at most, and the first that is known of it counts."""

    def __init__(self) -> None:
        self._moves: dict[str, _Move] = {}
        self._ended: list[_Move] = []

    def plan(self, plan_id: str, source: int, destination: int, names: Iterable[str]) -> None:
        """Trajectories `names` are to go from one replica to another."""
        move = _Move(plan_id, source, destination, set(names))
        self._moves |= dict.fromkeys(move.open, move)

    def know(self, name: str, fate: OutcomeOfMove) -> None:
        """What has become of a trajectory, if it was to move."""
        move = self._moves.pop(name, None)
        if move is None:
            return
        move.open.remove(name)
        move.fates.setdefault(fate, []).append(name)
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
                made=tuple(move.fates.get("made", ())),
                finished=tuple(move.fates.get("finished", ())),
                refused=tuple(move.fates.get("refused", ())),
                lost=tuple(move.fates.get("lost", ())),
                ended_at=now,
            )
            for move in ended
        ]
