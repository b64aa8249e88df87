"""The faults of a history: a list drawn from a seed, which can be shortened and written down."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

from infra.simulation.streams import Streams

FaultKind = Literal["kill", "pause", "replace", "requests", "cut", "drain", "slow", "pause_run", "restart_run"]
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
"""`kill`: a process dies and is started again. `pause`: it stops for a while. `replace`: it stops, its successor
starts, and it comes back. `requests`: some of its requests are lost, late or repeated. `cut`: none reaches the cluster.
`drain`: a person drains a replica. `slow`: its steps take longer. `pause_run`: a person pauses the run. `restart_run`:
all processes of the run end at once and are started again; this one is the last."""
PLACEMENT = "placement"
"""The role that a pause of the run is about."""
PAUSED_SHARE = 0.25
"""Share of the histories in which a person pauses the run."""
RESTARTED_SHARE = 0.15
"""Share of the histories in which the whole run ends and is started again."""
OF_THE_RUN = 100
"""The numbers of events of the whole run begin here."""
MAX_VALUE = 10**6
"""Maximum of a fault's numbers."""
_SHARES: Mapping[FaultKind, int] = {
    "kill": 8, "pause": 4, "replace": 3, "requests": 8, "cut": 3, "drain": 1, "slow": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A fault of role `role` at second `at`, for `seconds`. `number` seeds its own draws."""

    at: float
    kind: FaultKind
    role: str
    seconds: float
    number: int

    def __str__(self) -> str:
        return f"{self.at:7.2f} s  {self.kind} {self.role} for {self.seconds:.1f} s"

    def to_json(self) -> dict[str, Any]:
        """The fault as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Fault:
        """The fault of `to_json`. Raises ValueError."""
        try:
            fault = cls(**value)
        except TypeError as error:
            raise ValueError(f"not a fault: {str(value)[:200]}: {error}") from error
        for name, number in (("at", fault.at), ("seconds", fault.seconds), ("number", fault.number)):
            if type(number) not in (int, float) or not 0 <= number <= MAX_VALUE:
                raise ValueError(f"{name} of a fault must be from 0 to {MAX_VALUE}, not {str(number)[:40]}")
        if fault.kind not in FAULT_KINDS:
            raise ValueError(f"there is no fault {fault.kind!r}: choose from {', '.join(FAULT_KINDS)}")
        return fault


def draw_faults(seed: int, roles: Sequence[str], until_s: float) -> tuple[Fault, ...]:
    """Faults of roles within `until_s` seconds, in order of their times; some histories have few, some have many.

    Each fault, and each kind of event of the whole run, has its own stream: another kind changes few of the others.
    """
    streams = Streams(f"{seed} faults")
    weights: Mapping[str, float] = _SHARES
    mix, names = streams.of("mix"), dict.fromkeys(roles, 1.0)
    if mix.random() < 0.4:  # some defects need several faults of one kind, without others between them
        by_draw = sorted(_SHARES, key=lambda kind: streams.of("mix", kind).random())
        weights = {kind: _SHARES[kind] for kind in by_draw[: mix.randint(1, 3)]}
    favourite = streams.choose("favourite", names)
    rollouts = {name: 1.0 for name in roles if name.startswith("rollout")}
    found = []
    for number in range(mix.choice((1, 2, 4, 8, 14))):
        draws, purpose = streams.of("fault", str(number)), f"fault {number}"
        kind = cast(FaultKind, streams.choose(f"{purpose} kind", weights))
        role = streams.choose(f"{purpose} role", rollouts if kind == "drain" else names)
        if draws.random() < 0.3 and kind != "drain":
            role = favourite
        seconds = draws.choice((0.2, 2.0, 6.0, 15.0)) * draws.uniform(0.5, 1.5)
        found.append(Fault(round(draws.uniform(0.0, until_s), 3), kind, role, round(seconds, 3), number))
    found += _pauses(streams.of("pause_run"), until_s)
    draws = streams.of("restart_run")
    if draws.random() < RESTARTED_SHARE:
        at, seconds, last = draws.uniform(1.0, until_s), draws.uniform(0.5, 10.0), streams.choose("last", names)
        found.append(Fault(round(at, 3), "restart_run", last, round(seconds, 3), OF_THE_RUN + 10))
    return tuple(sorted(found, key=lambda fault: (fault.at, fault.number)))


def _pauses(draws: random.Random, until_s: float) -> Iterator[Fault]:
    if draws.random() < PAUSED_SHARE:
        for number in range(draws.choice((1, 1, 2))):
            at, seconds = draws.uniform(0.0, until_s), draws.choice((0.5, 4.0, 12.0)) * draws.uniform(0.5, 1.5)
            yield Fault(round(at, 3), "pause_run", PLACEMENT, round(seconds, 3), OF_THE_RUN + number)
