"""One replica: an engine, the assignments it was given, and the rule which weights it runs them under.

A trajectory starts and ends under one weight version. Weights change only while the engine is empty: to the version
that the next assignment names, or to the newest complete one.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from infra.store.errors import VersionGone
from operators.rollout.engine import Completion, Engine, Request
from schemas.columns import flags, floats, token_ids
from schemas.records import (
    Assignment,
    FinishReason,
    PolicyVersion,
    Refused,
    ReplicaState,
    Response,
    Trajectory,
    VersionSpan,
)

log = logging.getLogger(__name__)


class Weights(Protocol):
    """Where a replica finds weights on its machine."""

    def versions(self) -> Collection[PolicyVersion]:
        """The complete versions."""

    def pin(self, version: PolicyVersion) -> AbstractContextManager[Path]:
        """The file of `version`, which stays while the context lasts. Raises VersionGone."""


@dataclass(slots=True)
class _Running:
    assignment: Assignment
    started_at: int


class Replica:
    """Takes assignments, steps its engine, gives trajectories. `decode` turns response tokens into text."""

    def __init__(
        self,
        index: int,
        incarnation: int,
        engine: Engine,
        weights: Weights,
        decode: Callable[[list[int]], str],
        now: Callable[[], int],
    ) -> None:
        self.index, self.incarnation, self.engine = index, incarnation, engine
        self._weights, self._decode, self._now = weights, decode, now
        self._waiting: deque[Assignment] = deque()
        self._running: dict[str, _Running] = {}
        self.newest: PolicyVersion | None = None
        self.state: ReplicaState = "starting"

    def take(self, assignment: Assignment) -> None:
        """Accept an assignment; the caller has checked that it is for this incarnation.

        Of a trajectory that is here already only the lease is news.
        """
        name = assignment.trajectory_id
        if name in self._running:
            if assignment.lease > self._running[name].assignment.lease:
                self._running[name].assignment = assignment
            return
        for place, waiting in enumerate(self._waiting):
            if waiting.trajectory_id == name:
                self._waiting[place] = max(waiting, assignment, key=lambda each: each.lease)
                return
        self._waiting.append(assignment)

    def cancel(self, trajectory_ids: Collection[str]) -> None:
        """Drop these trajectories, whether they run or wait."""
        self._waiting = deque(a for a in self._waiting if a.trajectory_id not in trajectory_ids)
        self.engine.release([name for name in trajectory_ids if name in self._running])
        for name in trajectory_ids:
            self._running.pop(name, None)

    def announce(self, version: PolicyVersion) -> None:
        """A weight version was published."""
        self.newest = max(filter(None, (self.newest, version)))

    @property
    def idle(self) -> bool:
        """Whether there is nothing to generate."""
        return not (self._running or self._waiting)

    def busy(self) -> bool:
        """Whether there is anything to do by now, and weights to do it under."""
        if self._running:
            return self.engine.due() <= 0
        return bool(self._waiting and self.engine.version is not None)

    def step(self) -> list[Trajectory | Refused]:
        """Load weights if it is time to, start what can start, and run one engine step."""
        if not self._running:
            self._refresh()
        refused = self._start_waiting()
        if not self._running:
            return refused
        return [*refused, *(self._finish(completion) for completion in self.engine.step())]

    def _refresh(self) -> None:
        """Between two batches: the version that the next assignment names, else the newest that is complete here."""
        named = self._waiting[0].policy_version if self._waiting else None
        here = self._weights.versions()
        if named not in here:  # then whoever names it is refused
            # A version may be announced before its bytes are complete on this machine, and gone again later.
            named = max((v for v in here if self.newest is not None and v <= self.newest), default=None)
        if named is None or named == self.engine.version:
            return
        self.state = "loading"
        try:
            with self._weights.pin(named) as file:
                self.engine.load(file, named)
        except VersionGone as gone:
            log.warning("replica %d: weight version %s is gone: %s", self.index, named, gone)
        self.state = "running" if self.engine.version is not None else "starting"

    def _start_waiting(self) -> list[Trajectory | Refused]:
        """Submit what may run under the loaded version; what names another waits until the engine is empty."""
        refused: list[Trajectory | Refused] = []
        kept: deque[Assignment] = deque()
        version = self.engine.version
        while version is not None and self._waiting:
            assignment = self._waiting.popleft()
            if assignment.policy_version in (None, version):
                refused += self._submit(assignment)
            elif self._running or kept or assignment.policy_version in self._weights.versions():
                kept.append(assignment)
            else:
                refused.append(self._refuse(assignment, f"weight version {assignment.policy_version} is gone"))
        if version is not None:
            self._waiting = kept
        return refused

    def _submit(self, assignment: Assignment) -> list[Trajectory | Refused]:
        prompt = assignment.prompt
        name = assignment.trajectory_id
        try:
            self.engine.submit(Request(name, prompt.token_ids.to_numpy(), prompt.sampling))
        except ValueError as error:
            return [self._refuse(assignment, str(error))]
        self._running[name] = _Running(assignment, self._now())
        return []

    def _refuse(self, assignment: Assignment, reason: str) -> Refused:
        return Refused(assignment.trajectory_id, assignment.lease, self.index, self.incarnation, reason, retry=False)

    def _finish(self, completion: Completion) -> Trajectory:
        running = self._running.pop(completion.trajectory_id)
        assignment, generated = running.assignment, completion.generated
        version, count = self.engine.version, len(generated.token_ids)
        assert version is not None
        reason: FinishReason = completion.finish_reason  # type: ignore[assignment]
        return Trajectory(
            prompt=assignment.prompt,
            member=assignment.member,
            lease=assignment.lease,
            attempt=assignment.attempt,
            replica=self.index,
            incarnation=self.incarnation,
            response=Response(token_ids(generated.token_ids), floats(generated.logprobs), flags([True] * count)),
            text=self._decode(generated.token_ids.tolist()),
            version_spans=(VersionSpan(version, count),) if count else (),
            newest_version=self.newest,
            finish_reason=reason,
            error=completion.error,
            started_at=running.started_at,
            finished_at=self._now(),
        )
