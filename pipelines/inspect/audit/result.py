"""The result of an audit: the counts of both sides of its equation, and the names of offending trajectories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, get_args

AuditStage = Literal["prompts", "placement", "generation", "score", "experience", "evaluation", "training"]
STAGES: tuple[AuditStage, ...] = get_args(AuditStage)


class ReachedStage(NamedTuple):
    """A trajectory and the stage that has it or lost it."""

    trajectory_id: str
    stage: AuditStage


@dataclass(frozen=True, slots=True)
class Audit:
    """The outcome of every trajectory of a run. Each id in any topic is counted once:

    dispatched + undispatched = trained + untrained + dropped + failed + evaluated + imported + in flight + expired
    + lost.

    dispatched: an Assignment names it. undispatched: other records name it, but no Assignment (a prompt rejected before
    its dispatch, one that placement or the log lost, imported experience). trained: in a batch on the ancestor line of
    the newest manifest. imported: trained, and imported from a dataset. untrained: in a batch of the line that could
    not be trained; a dead letter has the reason. dropped, failed, evaluated: settled with that outcome, not trained.
    in_flight: not yet ended, by the stage that has it. expired: retention has deleted the records that would show the
    outcome. lost: a stage has committed past it without an output. A prompt whose number the log lacks before a
    later one is lost as its sample 0.

    trained_twice: in two batches of the line, twice in one, or in one that the line trained twice. without_reason:
    dropped with an empty reason. contradictions: trained, but settled with another outcome. duplicate_finishes: later
    Trajectory records of an id, which never count. settled_again: later Settled records of an id. undecodable: records
    that could not be decoded, or that no role accepts. still_in_flight: the names of trajectories in flight, if
    requested.
    """

    dispatched: int = 0
    undispatched: int = 0
    trained: int = 0
    untrained: int = 0
    dropped: int = 0
    failed: int = 0
    evaluated: int = 0
    imported: int = 0
    in_flight: Mapping[AuditStage, int] = field(default_factory=dict)
    expired: int = 0
    lost: tuple[ReachedStage, ...] = ()
    trained_twice: tuple[str, ...] = ()
    without_reason: tuple[str, ...] = ()
    contradictions: tuple[str, ...] = ()
    duplicate_finishes: int = 0
    settled_again: int = 0
    undecodable: int = 0
    still_in_flight: tuple[ReachedStage, ...] = ()

    @property
    def accounted(self) -> int:
        """The right side of the equation."""
        settled = self.dropped + self.failed + self.evaluated + self.imported
        return self.trained + self.untrained + settled + sum(self.in_flight.values()) + self.expired + len(self.lost)

    @property
    def passed(self) -> bool:
        """Whether both sides are equal, no trajectory is lost or trained twice, and every drop has a reason."""
        named = self.lost or self.trained_twice or self.without_reason or self.contradictions
        return self.dispatched + self.undispatched == self.accounted and not named

    def numbers(self) -> dict[str, int]:
        """The counts, as in a run's summary."""
        return {name: _number_of(getattr(self, name)) for name in NUMBERS}

    def to_json(self) -> dict[str, Any]:
        """The JSON form: the counts, those in flight by stage, and all names."""
        return {
            "passed": self.passed,
            **self.numbers(),
            "in_flight_by_stage": dict(self.in_flight),
            "named": {
                "lost": [each._asdict() for each in self.lost],
                "trained_twice": list(self.trained_twice),
                "without_reason": list(self.without_reason),
                "contradictions": list(self.contradictions),
                "in_flight": [each._asdict() for each in self.still_in_flight],
            },
        }


NUMBERS = tuple(each.name for each in fields(Audit) if each.name != "still_in_flight")
"""The names of all counts, in their order."""
FINDINGS = ("lost", "trained_twice", "without_reason", "contradictions")
"""The counts that must be 0."""
COUNTERS = tuple(each.name for each in fields(Audit) if each.default == 0)
"""The names of the counts that the audit does not give by stage or by trajectory."""


def _number_of(value: int | Mapping[AuditStage, int] | tuple[object, ...]) -> int:
    if isinstance(value, int):
        return value
    return sum(value.values()) if isinstance(value, Mapping) else len(value)


def findings_text(audit: Mapping[str, Any]) -> str:
    """The findings of `audit`, a failed audit as JSON: "2 lost, 1 trained twice"."""
    found = [f"{audit[name]} {name.replace('_', ' ')}" for name in FINDINGS if audit[name]]
    return ", ".join(found) or "its totals differ"
