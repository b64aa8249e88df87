"""The end of a run of any length: the records of its last groups, and the notes that its roles have committed.

A start reads back the groups that its note does not hold as closed. Here these are the last `HELD` groups: all their
trajectories are settled but one of the first group, which is still generated. So every ledger begins there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.kafka.session import Session
from infra.kafka.session_config import Partition
from operators.io.coalesce import coalesce
from operators.io.elements import Output
from schemas.columns import flags, floats, token_ids
from schemas.identity import TrajectoryKey, group_id, trajectory_id
from schemas.metric_labels import TASK, labelled
from schemas.records import (
    Assignment,
    Experience,
    PolicyVersion,
    Prompt,
    Response,
    Sampling,
    ScalingDecision,
    Settled,
    Trajectory,
    VersionSpan,
)
from schemas.topics import (
    DECISION,
    EXPERIENCES,
    INBOX,
    PROMPTS,
    SCALING,
    SETTLED,
    TRAJECTORIES,
    Topic,
)

HELD = 16
"""Groups of a batch of 128 trajectories."""
SAMPLES = 8
TOKENS = 256
"""Of a response."""
TASKS = 128
"""The most that score counts one by one."""
VERSIONS_PER_DECISION = 10
READ_AGAIN: Mapping[str, tuple[Topic, ...]] = {
    "placement": (PROMPTS, TRAJECTORIES, SETTLED),
    "experience": (EXPERIENCES,),
    "gateway": (INBOX, TRAJECTORIES),
    "agents": (TRAJECTORIES,),
    "autoscaler": (SCALING,),
}
"""Inputs that a role reads again from where the last groups begin, because a trajectory of the first is unfinished; the
autoscaler the newest decision."""


@dataclass(frozen=True)
class RunEnd:
    """The end of run `run` after so many trajectories and weight versions, of which each trained a batch. Topics have
    one partition; the last groups follow what is in them already.
    """

    run: str
    trajectories: int
    versions: int
    processes: int
    """Rollout processes, of the last decision."""

    @property
    def groups(self) -> int:
        """All groups of the run."""
        return max(HELD, self.trajectories // SAMPLES)

    @property
    def newest(self) -> PolicyVersion:
        return PolicyVersion(1, self.versions - 1)

    @property
    def decisions(self) -> int:
        """All decisions of the autoscaler."""
        return 1 + self.versions // VERSIONS_PER_DECISION

    def write(self, sessions: Mapping[str, Session]) -> None:
        """Let each role commit its records of the last groups; `sessions` are by role."""
        outputs: Mapping[str, Callable[[], Iterable[Output]]] = {
            "prompts": self._prompts,
            "placement": self._assignments,
            "rollout": self._trajectories,
            "score": self._experiences,
            "experience": self._settled,
            "autoscaler": self._decision,
        }
        for role, records in outputs.items():
            sessions[role].commit(coalesce(records(), lambda topic: topic.name(self.run)), {}, {}, {})

    def state(self, role: str, end_of: Callable[[Topic], int]) -> dict[str, Any]:
        """The state in the note of `role`; `end_of` returns the end of a topic."""
        closed, newest = {"p0": self.groups - HELD}, str(self.newest)
        match role:
            case "prompts":
                return {"number": self.groups, "tasks": [[[self.groups], 0, 0]], "refused": {}}
            case "placement":
                state = {"released": closed, "manifests": [newest, False, self.versions - 1]}
                numbers = {"prompts": {"train": self.groups}, "round": 0, "chain": self.versions}
                return {**state, **numbers, "lease": self.trajectories}
            case "rollout":
                return {"versions": [newest]}
            case "score":
                return {"scored": closed, "counts": self._counts()}
            case "experience":
                return {"settled": closed, "batch": self.versions, "newest": newest}
            case "evaluation":
                return {"evaluated": [self.versions, self.versions - 1, None, False], "newest": [newest, False]}
            case "gateway":
                totals = {name: float(self.trajectories) for name in ("episodes", "turns", "conversations")}
                counts = {"totals": totals, "counted": {"0": end_of(TRAJECTORIES)}}
                return {"finished": closed, "counts": counts}
            case "agents":
                return {"finished": closed}
            case "autoscaler":
                targets = {"target": self.processes, "asked": self.processes}
                done = {"number": self.decisions, "reported": self.decisions}
                return {**done, **targets, "cooldown": 0, "elapsed": float(self.versions)}
        return {}

    def _counts(self) -> dict[str, int]:
        """Score's counts, with those of the most tasks that it keeps."""
        each = self.trajectories // TASKS
        tasks = {labelled("trajectories", **{TASK: f"task-{number}"}): each for number in range(TASKS)}
        return {"trajectories": self.trajectories, **tasks}

    def _members(self) -> list[TrajectoryKey]:
        """The trajectories of the last groups, in order."""
        numbers = range(self.groups - HELD, self.groups)
        return [TrajectoryKey("train", number, member) for number in numbers for member in range(SAMPLES)]

    def _finished(self) -> list[TrajectoryKey]:
        unfinished = TrajectoryKey("train", self.groups - HELD, SAMPLES - 1)
        return [key for key in self._members() if key != unfinished]

    def _prompts(self) -> Iterable[Output]:
        for number in range(self.groups - HELD, self.groups):
            yield Output(PROMPTS, group_id("train", number), prompt(number), 0)

    def _assignments(self) -> Iterable[Output]:
        first = self.trajectories - len(self._members())
        for lease, key in enumerate(self._members(), first + 1):
            record = Assignment(prompt(key.number), key.member, lease, 1, 0, 1, None, None, 0)
            yield Output(INBOX, record.trajectory_id, record, 0)

    def _trajectory(self, key: TrajectoryKey) -> Trajectory:
        lease = self.trajectories - len(self._members()) + 1 + self._members().index(key)
        return Trajectory(
            prompt=prompt(key.number),
            member=key.member,
            lease=lease,
            attempt=1,
            replica=0,
            incarnation=1,
            response=Response(token_ids([1] * TOKENS), floats([-0.5] * TOKENS), flags([True] * TOKENS)),
            text="an answer",
            version_spans=(VersionSpan(self.newest, TOKENS),),
            newest_version=self.newest,
            finish_reason="stop",
            error=None,
            started_at=0,
            first_token_at=0,
            finished_at=0,
        )

    def _trajectories(self) -> Iterable[Output]:
        for key in self._finished():
            yield Output(TRAJECTORIES, group_id("train", key.number), self._trajectory(key), 0)

    def _experiences(self) -> Iterable[Output]:
        for key in self._finished():
            record = Experience(self._trajectory(key), 1.0, (), None, 0)
            yield Output(EXPERIENCES, group_id("train", key.number), record, 0)

    def _settled(self) -> Iterable[Output]:
        for key in self._finished():
            if key.number > self.groups - HELD:  # the first group is still incomplete
                name = trajectory_id(*key)
                yield Output(SETTLED, "", Settled(name, SAMPLES, "batched", "", self.versions - 1, 0, TOKENS, 0), 0)

    def _decision(self) -> Iterable[Output]:
        count = self.processes
        decision = ScalingDecision(self.decisions, "queue", count, count, count, "a reason", False, 0)
        yield Output(SCALING, DECISION, decision, 0)


def prompt(number: int) -> Prompt:
    """Prompt `number` of training."""
    sampling = Sampling(1.0, 1.0, 0, TOKENS, (), 0)
    return Prompt(number, "train", "task-0", "a question", token_ids([1] * 64), "{}", SAMPLES, sampling)


def begins_of(ends: Mapping[Partition, int], run: str, topics: Sequence[Topic]) -> dict[Partition, int]:
    """Where the last groups begin in `topics`, by the `ends` before they were written."""
    names = {topic.name(run) for topic in topics}
    return {place: end for place, end in ends.items() if place.topic in names}
