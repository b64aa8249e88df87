"""The buffer and the trainer of a predicted cluster: counts of tokens instead of columns of them.

Groups are trained in the order in which they complete, as by the default sampler of the buffer. The trainer follows
`operators/trainer/emulate_training.py`: a step takes the time of `TrainerEmulation`, then the weights are handed over
for `stall_s`, and `broadcast_s` later every machine has them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from infra.simulation.scheduler import EventScheduler
from pipelines.simulate.prediction.cluster import Cluster
from schemas.records import PolicyVersion, Settled, Trajectory

EPOCH = 1


@dataclass(frozen=True, slots=True)
class Member:
    """A finished trajectory: its id, its tokens (prompt included) and the number of its oldest version."""

    name: str
    tokens: int
    version: int


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """A global batch that was trained. Times are seconds of the clock; `tokens` include prompts."""

    number: int
    begins: float
    ends: float
    waited: float
    tokens: int
    trajectories: int
    staleness: tuple[int, ...]
    """Of each trajectory: versions trained since the one that generated its first token."""


class PredictedTraining:
    """Collects the groups of `cluster`, settles its global batches, trains them and publishes versions.

    A batch is trained in `training_parts` equal parts, each as soon as its groups are complete: with 1 the trainer
    waits for the whole batch. `settle` gets the records of a batch, `publish` the number of a version that has arrived.
    """

    def __init__(
        self,
        scheduler: EventScheduler,
        cluster: Cluster,
        settle: Callable[[list[Settled]], None],
        publish: Callable[[int], None],
    ) -> None:
        config, self._parts, self._batch_s = cluster.config, cluster.training_parts, cluster.overheads.batch_s
        self._scheduler, self._settle, self._publish = scheduler, settle, publish
        self._emulation, self._scale = config.trainer.emulation, config.run.time_scale
        self._stride = config.rollout.emulation.stride
        self._samples = config.prompts.mixture[0].samples_per_prompt
        self._part = -(-config.experience.global_batch // self._parts)
        self._groups: dict[int, list[Member]] = {}
        self._ready: deque[list[Member]] = deque()
        self._cut = 0
        """Parts cut so far."""
        self._queue: deque[tuple[float, list[Member]]] = deque()
        self._free_at = 0.0
        self._training = False
        self._done: list[TrainedStep] = []
        self.speed = 1.0
        """How many times as fast as the emulated trainer this one is: its GPUs may change between two batches."""
        self.version = 0
        """The number of the version that was published last."""
        self.steps: list[TrainedStep] = []

    def add(self, trajectory: Trajectory) -> None:
        """Add a finished trajectory; its group is ready with the last of its members."""
        group = self._groups.setdefault(trajectory.prompt.number, [])
        oldest = min((span.version.number for span in trajectory.version_spans), default=self.version)
        tokens = len(trajectory.prompt.token_ids) + len(trajectory.response.token_ids)
        group.append(Member(trajectory.trajectory_id, tokens * self._stride, oldest))
        if len(group) < self._samples:
            return
        self._ready.append(self._groups.pop(trajectory.prompt.number))
        while len(self._ready) * self._samples >= self._part:
            self._cut_part()

    def pause(self, seconds: float) -> None:
        """Begin no further step for `seconds` of the clock, such as while the trainer's ranks form anew."""
        self._free_at = max(self._free_at, self._scheduler.now + seconds)

    def _cut_part(self) -> None:
        members: list[Member] = []
        while len(members) < self._part:
            members += self._ready.popleft()
        batch, self._cut = self._cut // self._parts, self._cut + 1
        now = int(self._scheduler.now * 1000)
        self._settle(
            [
                Settled(each.name, self._samples, "batched", "", batch, self.version - each.version, each.tokens, now)
                for each in members
            ]
        )
        self._queue.append((self._scheduler.now + self._batch_s, members))
        self._begin()

    def _begin(self) -> None:
        if self._training or not self._queue:
            return
        available, members = self._queue.popleft()
        begins = max(available, self._free_at)
        tokens = sum(each.tokens for each in members)
        fixed = self._emulation.seconds(0)
        seconds = self._emulation.seconds(tokens) - fixed + fixed / self._parts
        ends = begins + self._emulation.factor(len(self.steps)) * seconds / self._scale / self.speed
        # A version that is still on its way counts: this step trains the weights after it.
        staleness = tuple(len(self.steps) - each.version for each in members)
        number = len(self.steps) + 1
        step = TrainedStep(number, begins, ends, begins - self._free_at, tokens, len(members), staleness)
        self._training = True
        self._scheduler.at(ends, lambda: self._finish(step))

    def _finish(self, part: TrainedStep) -> None:
        self._training = False
        self._free_at = part.ends
        self._done.append(part)
        if len(self._done) == self._parts:
            self.steps.append(_joined(self._done))
            self._done = []
            self._free_at += self._emulation.stall_s / self._scale
            number = len(self.steps)
            self._scheduler.at(self._free_at + self._emulation.broadcast_s / self._scale, lambda: self._arrived(number))
        self._begin()

    def _arrived(self, number: int) -> None:
        self.version = number
        self._publish(number)


def version_of(number: int) -> PolicyVersion:
    """The version after `number` steps."""
    return PolicyVersion(EPOCH, number)


def _joined(parts: list[TrainedStep]) -> TrainedStep:
    first, last = parts[0], parts[-1]
    return TrainedStep(
        first.number,
        first.begins,
        last.ends,
        sum(part.waited for part in parts),
        sum(part.tokens for part in parts),
        sum(part.trajectories for part in parts),
        tuple(each for part in parts for each in part.staleness),
    )
