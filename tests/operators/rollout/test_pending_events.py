"""When the events of replicas are due: an agent waits, all is idle, the linger has passed, or a burst has ended."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from record_factories import prompt, trajectory, version
from scripted_engine import ScriptedEngine, ScriptedWeights
from test_replica import assignment

from operators.rollout.pending_events import PendingEvents
from operators.rollout.replica import Replica

LINGER_S = 0.2


class Replicas:
    """Two replicas: what they run, by when it was started."""

    def __init__(self) -> None:
        self.now = 0.0
        self.started: list[list[int]] = [[], []]
        self.pending = PendingEvents(self, LINGER_S, lambda: self.now)  # type: ignore[arg-type]

    def __iter__(self) -> Any:
        for started in self.started:
            running = {str(n): SimpleNamespace(started_at=at) for n, at in enumerate(started)}
            yield SimpleNamespace(running=running, idle=not running)

    def finish(self, *starts: int, urgent: bool = False) -> int:
        """Finish trajectories that were started at these times; returns how many are published then."""
        self.pending.add([trajectory(prompt(0), 0, started_at=at) for at in starts], urgent)
        return len(self.pending.take_due())


@pytest.fixture
def replicas() -> Replicas:
    return Replicas()


def test_nothing_is_due_without_events(replicas: Replicas) -> None:
    assert replicas.pending.take_due() == []
    assert not replicas.pending.urgent


def test_idle_replicas_publish_at_once(replicas: Replicas) -> None:
    assert replicas.finish(1, 2) == 2
    assert not replicas.pending


def test_urgent_events_take_others_along(replicas: Replicas) -> None:
    replicas.started[1] = [1]
    assert replicas.finish(1) == 0
    assert replicas.finish(1, urgent=True) == 2


def test_events_linger_from_the_first_of_them(replicas: Replicas) -> None:
    replicas.started[0] = [1]
    assert replicas.finish(2) == 0
    replicas.now = LINGER_S / 2
    assert replicas.finish(3) == 0
    replicas.now = LINGER_S
    assert len(replicas.pending.take_due()) == 2
    assert replicas.finish(4) == 0  # the next ones linger anew


@pytest.mark.parametrize(
    ("finished", "running", "expected"),
    [
        ((5, 6), ([7, 7], [8]), 2),  # all of a burst has ended, and the next one runs
        ((5, 6), ([7, 7], [6]), 0),  # one of the burst still runs, in another replica
        ((5, 6), ([5, 7], []), 0),
        ((5, 6), ([6], []), 0),
        ((5, 6), ([7] * 4, []), 2),
        ((5, 6), ([7] * 3, [7] * 2), 0),  # two of seven are no burst: equal responses that end one after another
    ],
)
def test_end_of_a_burst_is_due(
    replicas: Replicas, finished: tuple[int, ...], running: tuple[list[int], ...], expected: int
) -> None:
    replicas.started = list(running)
    assert replicas.finish(*finished) == expected


def test_burst_may_end_in_several_steps(replicas: Replicas) -> None:
    replicas.started = [[5, 7, 7], [7]]
    assert replicas.finish(5) == 0
    replicas.started[0].remove(5)
    assert replicas.finish(5) == 2
    assert replicas.finish(7) == 0  # the older burst does not count any more


def test_assignments_of_one_dispatch_are_one_burst() -> None:
    engine, weights, times = ScriptedEngine(steps=lambda name: 1 + int(name[1])), ScriptedWeights(), count(42)
    replica = Replica(0, 7, engine, weights, str, lambda: next(times))
    weights.add(version(0))
    replica.announce(version(0))
    pending = PendingEvents((replica,), LINGER_S, lambda: 0.0)
    for number in range(3):
        replica.accept(assignment(number))
    taken = []
    for _ in range(3):
        pending.add(replica.step())
        taken.append(len(pending.take_due()))
    assert taken == [0, 0, 3]  # the first waits for those that were dispatched with it
