"""The faults of a history: a list drawn from a seed, which can be shortened and written down."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

from infra.simulation.streams import Streams

FaultKind = Literal[
    "kill",
    "pause",
    "replace",
    "requests",
    "cut",
    "drain",
    "slow",
    "links",
    "restart_host",
    "pause_run",
    "restart_run",
    "upgrade_run",
    "extend_run",
    "trim",
    "markers",
    "move_coordinator",
    "stop",
    "notice",
    "isolate_broker",
    "reshard_run",
    "expire_offsets",
    "change_ranks",
    "late_reads",
]
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
"""`kill`: a process dies and is started again. `pause`: it stops for a while. `replace`: it stops, its successor
starts, and it comes back. `requests`: some of its requests are lost, late or repeated, and some partitions cannot be
read for a while. `cut`: none reaches the cluster.
`drain`: a person drains a replica. `slow`: its steps take longer. `pause_run`: a person pauses the run. `restart_run`:
all processes of the run end at once and are started again; this one is the last. `upgrade_run`: the same, and the
processes before it are of an earlier release, which wrote earlier versions of records. `extend_run`: the same as
`restart_run`, with a later goal, if the run has one. `links`: the link of its host is
slow, lossy, cut, or damages data. `restart_host`: all processes on its host end, and the weights stored there are lost.
`trim`: a person trims the log of the run; the command is killed after these seconds. `markers`: the markers of
all transactions that end are written late, in each partition at another time. `move_coordinator`: the coordinator of
its transactions moves to another broker, and rejects requests meanwhile. `stop`: a process is asked to end, and commits
its last outputs. `notice`: a rollout has these seconds until it is killed, and hands its work over. `isolate_broker`: a
broker does not reach the others, and this process still reads what it has, while the run goes on with the others.
`reshard_run`: the run ends and is resumed with other shards of score or of the buffer, if it has some; the command that
changes them may be killed once. `expire_offsets`: Kafka forgets the offsets of all groups, as it does after a week
without commits. `change_ranks`: the run ends and is resumed with another number of ranks of the trainer, if batches
have shares. `late_reads`: now and then a process cannot read some partitions for a while."""
PLACEMENT = "placement"
"""The role in events of the whole run."""
TRAINER = "trainer"
FAULTLESS_SHARE = 0.05
"""Share of the histories without faults: nothing at all may fail there."""
PAUSED_SHARE = 0.25
"""Share of the histories in which a person pauses the run."""
RESTARTED_SHARE = 0.15
"""Share of the histories in which the whole run ends and is started again."""
OF_THE_RUN = 100
"""The numbers of events of the whole run begin here."""
MAX_VALUE = 10**6
"""Maximum of a fault's numbers."""
RESHARDED_SHARE = 0.5
"""Share of the histories with shards of score in which their number changes."""
RERANKED_SHARE = 0.5
"""Share of the histories with several ranks in which their number changes."""
EXPIRED_SHARE = 0.1
"""Share of the histories in which Kafka forgets offsets."""
EXTENDED_SHARE = 0.2
"""Share of the histories in which a run with a goal is resumed with a later one."""
UPGRADED_SHARE = 0.12
"""Share of the histories in which a run of an earlier release is upgraded."""
TRIMMED_SHARE = 0.2
"""Share of the histories in which the log is trimmed."""
LOST_SHARE = 0.3
"""Share of the histories in which placement starts again after it has given the work of a lost rollout to others."""
UNDELIVERED_SHARE = 0.2
"""Share of the histories with relays in which a relay's host restarts, and the trainer meanwhile."""
LOST_RANK_SHARE = 0.4
"""Share of the histories with several ranks in which one ends before the first batches."""
ENDED_SHARE = 0.2
"""Share of the histories in which a rollout ends while placement reads its records slowly."""
LATE_SHARE = 0.2
"""Share of the histories in which a paused trainer writes late, and a reader starts again then."""
COORDINATORS_SHARE = 0.15
"""Share of the histories for each kind of fault of coordinators."""
ISOLATED_SHARE = 0.2
"""Share of the histories in which a broker is isolated."""
STOPPED_SHARE = 0.15
"""Share of the histories in which processes are asked to end, and of those in which rollouts get notice."""
_SHARES: Mapping[FaultKind, int] = {
    "kill": 8, "pause": 4, "replace": 3, "requests": 8, "cut": 3, "drain": 1, "slow": 2,
}  # fmt: skip
_SHARES_OF_HOSTS: Mapping[FaultKind, int] = {"links": 8, "restart_host": 2}
"""With relays."""
TRAINERS_RELAY = "relay-0"
"""The weights on its host are only lost with the trainer's checkpoints, which an emulated run does not have."""


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
    """Faults of roles within `until_s` seconds, in order of their times; some histories have none or few, some many.

    Each fault, and each kind of event of the whole run, has its own stream: another kind changes few of the others.
    """
    streams = Streams(f"{seed} faults")
    if streams.of("without faults").random() < FAULTLESS_SHARE:
        return ()
    hosted = {name: 1.0 for name in roles if name.startswith(("relay", "rollout", "trainer"))}
    relays = {name: 1.0 for name in hosted if name.startswith("relay") and name != TRAINERS_RELAY}
    weights: Mapping[str, float] = {**_SHARES, **(_SHARES_OF_HOSTS if relays else {})}  # type: ignore[dict-item]
    mix, names = streams.of("mix"), dict.fromkeys(roles, 1.0)
    if mix.random() < 0.4:  # some defects need several faults of one kind, without others between them
        by_draw = sorted(weights, key=lambda kind: streams.of("mix", kind).random())
        weights = {kind: weights[kind] for kind in by_draw[: mix.randint(1, 3)]}
    favourite = streams.choose("favourite", names)
    rollouts = {name: 1.0 for name in roles if name.startswith("rollout")}
    choices = {"drain": rollouts, "links": hosted, "restart_host": relays}
    found = []
    for number in range(mix.choice((1, 2, 4, 8, 14))):
        draws, purpose = streams.of("fault", str(number)), f"fault {number}"
        kind = cast(FaultKind, streams.choose(f"{purpose} kind", weights))
        role = streams.choose(f"{purpose} role", choices.get(kind, names))
        if draws.random() < 0.3 and kind not in choices:
            role = favourite
        seconds = draws.choice((0.2, 2.0, 6.0, 15.0)) * draws.uniform(0.5, 1.5)
        found.append(Fault(round(draws.uniform(0.0, until_s), 3), kind, role, round(seconds, 3), number))
    found += _pauses(streams.of("pause_run"), until_s)
    found += _restarts(streams, names, until_s)
    found += _trims(streams.of("trim"), until_s)
    found += _losses(streams, rollouts, until_s)
    found += _ends(streams, rollouts, until_s)
    found += _late_trainers(streams, names)
    found += _trainers_ends(streams, {name: 1.0 for name in roles if name.startswith(TRAINER)}, relays, until_s)
    found += _coordinators(streams, names, until_s)
    found += _isolations(streams, names, until_s)
    found += _stops(streams, {"stop": names, "notice": rollouts}, until_s)
    return tuple(sorted(found, key=lambda fault: (fault.at, fault.number)))


def _pauses(draws: random.Random, until_s: float) -> Iterator[Fault]:
    if draws.random() < PAUSED_SHARE:
        for number in range(draws.choice((1, 1, 2))):
            at, seconds = draws.uniform(0.0, until_s), draws.choice((0.5, 4.0, 12.0)) * draws.uniform(0.5, 1.5)
            yield Fault(round(at, 3), "pause_run", PLACEMENT, round(seconds, 3), OF_THE_RUN + number)


def _restarts(streams: Streams, names: Mapping[str, float], until_s: float) -> Iterator[Fault]:
    shares: Mapping[FaultKind, float] = {
        "restart_run": RESTARTED_SHARE,
        "upgrade_run": UPGRADED_SHARE,
        "extend_run": EXTENDED_SHARE,
        "reshard_run": RESHARDED_SHARE,
        "expire_offsets": EXPIRED_SHARE,
        "change_ranks": RERANKED_SHARE,
    }
    for number, (kind, share) in enumerate(shares.items(), OF_THE_RUN + 10):
        draws = streams.of(kind)
        if draws.random() < share:
            at, seconds = draws.uniform(1.0, until_s), draws.uniform(0.5, 10.0)
            yield Fault(round(at, 3), kind, streams.choose(f"last of {kind}", names), round(seconds, 3), number)


def _trims(draws: random.Random, until_s: float) -> Iterator[Fault]:
    if draws.random() < TRIMMED_SHARE:
        for number in range(draws.choice((1, 2))):
            at, seconds = draws.uniform(5.0, until_s), draws.choice((0.5, 1.0, 30.0, 30.0)) * draws.uniform(0.2, 1.0)
            yield Fault(round(at, 3), "trim", PLACEMENT, round(seconds, 3), OF_THE_RUN + 20 + number)


def _losses(streams: Streams, rollouts: Mapping[str, float], until_s: float) -> Iterator[Fault]:
    draws = streams.of("lost rollout")
    if draws.random() < LOST_SHARE:
        at = draws.uniform(2.0, until_s - 8.0)
        yield Fault(round(at, 3), "kill", streams.choose("lost rollout", rollouts), 1.0, OF_THE_RUN + 30)
        yield Fault(round(at + draws.uniform(2.0, 8.0), 3), "kill", PLACEMENT, 1.0, OF_THE_RUN + 31)


def _ends(streams: Streams, rollouts: Mapping[str, float], until_s: float) -> Iterator[Fault]:
    """Ends of a rollout while placement pauses, and then reads some partitions late."""
    draws = streams.of("ended rollout")
    if draws.random() < ENDED_SHARE:
        at, paused = draws.uniform(2.0, until_s - 8.0), draws.choice((3.0, 6.0)) * draws.uniform(0.8, 1.2)
        yield Fault(round(at, 3), "pause", PLACEMENT, round(paused, 3), OF_THE_RUN + 90)
        yield Fault(round(at + 0.3 * paused, 3), "late_reads", PLACEMENT, 20.0, OF_THE_RUN + 91)
        role, killed = streams.choose("ended rollout", rollouts), at + draws.uniform(0.5, 1.0) * paused
        yield Fault(round(killed, 3), "kill", role, 0.3, OF_THE_RUN + 92)


def _late_trainers(streams: Streams, names: Mapping[str, float]) -> Iterator[Fault]:
    """A trainer that comes back after its successor, and writes then what another role reads first in its new start."""
    draws = streams.of("late trainer")
    if draws.random() < LATE_SHARE:
        at, seconds = draws.uniform(3.0, 8.0), draws.uniform(9.0, 14.0)
        yield Fault(round(at, 3), "replace", TRAINER, round(seconds, 3), OF_THE_RUN + 95)
        role, killed = streams.choose("late trainer", names), at + seconds - draws.uniform(0.0, 1.5)
        yield Fault(round(killed, 3), "kill", role, 3.0, OF_THE_RUN + 96)


def _trainers_ends(
    streams: Streams, ranks: Mapping[str, float], relays: Mapping[str, float], until_s: float
) -> Iterator[Fault]:
    """Ends of a rank while no relay can take a version, and before the first batches."""
    draws = streams.of("undelivered version")
    if relays and draws.random() < UNDELIVERED_SHARE:
        at, seconds = draws.uniform(3.0, until_s - 10.0), draws.uniform(3.0, 8.0)
        yield Fault(
            round(at, 3), "restart_host", streams.choose("undelivered", relays), round(seconds, 3), OF_THE_RUN + 110
        )
        ended = at + draws.uniform(0.0, min(seconds, 5.0))
        yield Fault(round(ended, 3), "kill", streams.choose("undelivered by", ranks), 0.5, OF_THE_RUN + 111)
    draws = streams.of("lost rank")
    if len(ranks) > 1 and draws.random() < LOST_RANK_SHARE:
        at = draws.uniform(0.5, 8.0)
        yield Fault(round(at, 3), "kill", streams.choose("lost rank", ranks), 0.5, OF_THE_RUN + 112)


def _coordinators(streams: Streams, names: Mapping[str, float], until_s: float) -> Iterator[Fault]:
    kinds: tuple[FaultKind, ...] = ("markers", "move_coordinator")
    for number, kind in enumerate(kinds, OF_THE_RUN + 40):
        draws = streams.of(kind)
        if draws.random() < COORDINATORS_SHARE:
            at, seconds = draws.uniform(0.0, until_s), draws.choice((2.0, 6.0, 20.0)) * draws.uniform(0.5, 1.5)
            role = PLACEMENT if kind == "markers" else streams.choose(kind, names)
            yield Fault(round(at, 3), kind, role, round(seconds, 3), number)


def _isolations(streams: Streams, names: Mapping[str, float], until_s: float) -> Iterator[Fault]:
    """Brokers that are isolated; half of the processes that still reach one are restarted meanwhile."""
    draws = streams.of("isolate_broker")
    if draws.random() < ISOLATED_SHARE:
        at, seconds = draws.uniform(0.0, until_s - 10.0), draws.choice((1.0, 5.0, 15.0)) * draws.uniform(0.5, 1.5)
        role = streams.choose("isolate_broker", names)
        yield Fault(round(at, 3), "isolate_broker", role, round(seconds, 3), OF_THE_RUN + 80)
        if draws.random() < 0.5:
            yield Fault(round(at + seconds * draws.random(), 3), "kill", role, 0.5, OF_THE_RUN + 81)


def _stops(streams: Streams, roles: Mapping[FaultKind, Mapping[str, float]], until_s: float) -> Iterator[Fault]:
    for index, (kind, names) in enumerate(roles.items()):
        draws = streams.of(kind)
        if draws.random() < STOPPED_SHARE:
            for number in range(draws.choice((1, 2, 4))):
                role, at = streams.choose(f"{kind} {number}", names), draws.uniform(1.0, until_s)
                seconds = draws.choice((6.0, 12.0, 30.0))
                yield Fault(round(at, 3), kind, role, seconds, OF_THE_RUN + 50 + 10 * index + number)
