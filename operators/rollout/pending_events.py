"""What replicas have to publish, until a transaction takes it: together, because each transaction has its costs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from operators.rollout.replica import Replica, ReplicaEvent
from schemas.records import AGENT, Trajectory, TurnEnded


@dataclass
class _Collected:
    """Events since `since`; `finished` of them are trajectories, the last of which was started at `newest_start`."""

    events: list[ReplicaEvent] = field(default_factory=list)
    since: float = 0.0
    urgent: bool = False
    finished: int = 0
    newest_start: int = 0


class PendingEvents:
    """The events of `replicas`, a live collection. They are due `linger_s` seconds after the first of them, and earlier

    - if an agent waits for one of them, or the caller says that another process does;
    - if all replicas are idle;
    - if a burst has ended: what still runs was started after all that has finished, and is at most twice as much. So
      nothing that belongs to these trajectories is still to come, such as the rest of a batch that was dispatched at
      once. Where responses end evenly, older ones always run, and half of what runs is a transaction at the most.
    """

    def __init__(self, replicas: Collection[Replica], linger_s: float, clock: Callable[[], float]) -> None:
        self._replicas, self._linger_s, self._clock = replicas, linger_s, clock
        self._collected = _Collected()

    def __bool__(self) -> bool:
        return bool(self._collected.events)

    def add(self, events: Sequence[ReplicaEvent], urgent: bool = False) -> None:
        """Collect `events`, which `urgent` makes due at once."""
        if not events:
            return
        collected = self._collected
        if not collected.events:
            collected.since = self._clock()
        collected.events += events
        collected.urgent |= urgent or any(map(_is_awaited, events))
        starts = [event.started_at for event in events if isinstance(event, Trajectory)]
        collected.finished += len(starts)
        collected.newest_start = max(collected.newest_start, *starts, 0)

    @property
    def urgent(self) -> bool:
        """Whether more steps of the engines would delay what somebody waits for, and gain nothing."""
        return self._collected.urgent or self._burst_ended()

    def take_due(self) -> list[ReplicaEvent]:
        """All pending events if they are due, else none."""
        collected = self._collected
        if not collected.events:
            return []
        idle = all(replica.idle for replica in self._replicas)
        if not (idle or self.urgent) and self._clock() - collected.since < self._linger_s:
            return []
        self._collected = _Collected()
        return collected.events

    def _burst_ended(self) -> bool:
        running, collected = [replica.running for replica in self._replicas], self._collected
        if not collected.finished or sum(map(len, running)) > 2 * collected.finished:
            return False
        oldest = (next(iter(each.values())).started_at for each in running if each)
        return all(started_at > collected.newest_start for started_at in oldest)


def _is_awaited(event: ReplicaEvent) -> bool:
    """Whether an agent waits for `event`."""
    return isinstance(event, TurnEnded) or (isinstance(event, Trajectory) and event.prompt.environment == AGENT)
