"""What a predicted run measures, from its events. All times and rates are in emulated seconds and real tokens."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from operators.io.repartition import Placed
from pipelines.simulate.prediction.cluster import Cluster
from pipelines.simulate.prediction.training import TrainedStep
from schemas.records import RepackPlan, ReplicaStatus, Trajectory

WARM_UP = 2
"""Optimizer steps before the measured time: pipelines fill, and all replicas start at once."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The figures of a predicted run, from the end of step `WARM_UP` to the end of the last; shares of 0 to 1."""

    seconds: float
    trained_tokens_per_s: float
    """Tokens of global batches, prompts included, per second: the throughput of the Laminar paper."""
    generated_tokens_per_s: float
    iteration_s: float
    kv_use: float
    latency_s: float
    """Mean from a trajectory's first assignment to its finish."""
    staleness_mean: float
    staleness_max: int
    finish_staleness: tuple[float, ...]
    """Shares of trajectories by versions published between their begin and their finish."""
    trainer_idle: float
    rollout_idle: float
    bubbles: float
    """Idle share of all GPUs' time."""
    moved: int
    trajectories: int
    gpu_hours_per_billion_tokens: float

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


class LoadSample(NamedTuple):
    """What a replica said at a time of the clock. `version` is the number of its weights, None before the first; it has
    had requests for `busy_s` seconds."""

    at: float
    kv_use: float
    busy_s: float
    tokens: int
    version: int | None


class Measurement:
    """Collects the events of a run."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._scale, self._stride = cluster.config.run.time_scale, cluster.config.rollout.emulation.stride
        self._assigned: dict[str, float] = {}
        self._ended: list[tuple[float, float, int]] = []
        """At, latency and staleness of each finished trajectory, in seconds of the clock."""
        self.beats: dict[int, list[LoadSample]] = defaultdict(list)
        """By replica."""
        self.moves: Counter[str] = Counter()
        self.steps: Sequence[TrainedStep] = ()
        self._until = 0.0

    def placed(self, placed: Placed, now: float) -> None:
        """A trajectory was assigned or handed over."""
        self._assigned.setdefault(placed.assignment.trajectory_id, now)
        self.moves[placed.reason] += 1

    def planned(self, plan: RepackPlan) -> None:
        """Placement planned moves."""
        self.moves[f"plans/{plan.reason}"] += 1

    def finished(self, trajectory: Trajectory, now: float, newest: int) -> None:
        """A trajectory has finished while `newest` was the newest version."""
        began = self._assigned.pop(trajectory.trajectory_id, now)
        spans = trajectory.version_spans
        staleness = newest - spans[0].version.number if spans else 0
        self._ended.append((now, now - began, staleness))

    def beat(self, status: ReplicaStatus, busy_s: float, now: float) -> None:
        """A replica has sent its status, after having had requests for `busy_s` seconds."""
        use = status.kv_used / status.kv_capacity if status.kv_capacity else 0.0
        version = None if status.policy_version is None else status.policy_version.number
        self.beats[status.replica].append(LoadSample(now, use, busy_s, status.tokens_generated, version))

    def finish(self, now: float, steps: Sequence[TrainedStep]) -> None:
        """The run has ended."""
        self.steps, self._until = steps, now

    def unfinished(self, before: float) -> int:
        """Trajectories that were first assigned before a time of the clock, and have not finished."""
        return sum(at < before for at in self._assigned.values())

    @property
    def trajectories(self) -> int:
        """Finished trajectories of the whole run."""
        return len(self._ended)

    def prediction(self) -> Prediction:
        """The figures. Raises ValueError if the run had too few steps."""
        if len(self.steps) < WARM_UP + 1:
            raise ValueError(f"{len(self.steps)} optimizer steps are too few: at least {WARM_UP + 1} are needed")
        begin, end = self.steps[WARM_UP - 1].ends, self.steps[-1].ends
        measured = self.steps[WARM_UP:]
        seconds = (end - begin) * self._scale
        tokens = sum(step.tokens for step in measured)
        trainer_idle = min(1.0, sum(step.waited for step in measured) * self._scale / seconds)
        spans = [self._spans(replica, begin, end) for replica in self.beats]
        kv_use = float(np.mean([use for use, _, _ in spans]))
        rollout_idle = float(np.mean([idle for _, idle, _ in spans]))
        ended = [each for each in self._ended if begin <= each[0] <= end]
        staleness = [each for step in measured for each in step.staleness]
        ages = Counter(age for _, _, age in ended)
        return Prediction(
            seconds=seconds,
            trained_tokens_per_s=tokens / seconds,
            generated_tokens_per_s=sum(rate for _, _, rate in spans) * self._stride / self._scale,
            iteration_s=seconds / len(measured),
            kv_use=kv_use,
            latency_s=float(np.mean([latency for _, latency, _ in ended])) * self._scale,
            staleness_mean=float(np.mean(staleness)),
            staleness_max=max(staleness),
            finish_staleness=tuple(ages[age] / len(ended) for age in range(max(ages) + 1)),
            trainer_idle=trainer_idle,
            rollout_idle=rollout_idle,
            bubbles=self._bubbles(trainer_idle, rollout_idle),
            moved=self.moves["hand_over"],
            trajectories=len(self._ended),
            gpu_hours_per_billion_tokens=self._cluster.gpus * seconds / 3600 / (tokens / 1e9),
        )

    def kv_cycle(self, parts: int = 10) -> tuple[float, ...]:
        """Mean KV use in each of `parts` equal parts of the time for which a replica has a version; empty if no replica
        has had one for so many heartbeats. The first and the last version of a replica do not count.
        """
        cycles = []
        for beats in self.beats.values():
            spells = [list(spell) for _, spell in groupby(beats, lambda beat: beat.version)]
            for spell in spells[2:-1]:  # without the one before the first version
                if len(spell) >= parts:
                    uses = [beat.kv_use for beat in spell]
                    cycles.append([float(np.mean(part)) for part in np.array_split(uses, parts)])
        return tuple(np.mean(cycles, axis=0).tolist()) if cycles else ()

    def _bubbles(self, trainer_idle: float, rollout_idle: float) -> float:
        cluster = self._cluster
        rollouts = cluster.replicas * cluster.gpus_per_replica
        if cluster.colocated:  # each waits while the other works: idle is what neither uses
            return max(0.0, trainer_idle + rollout_idle - 1.0)
        return (trainer_idle * cluster.train_gpus + rollout_idle * rollouts) / cluster.gpus

    def _spans(self, replica: int, begin: float, end: float) -> tuple[float, float, float]:
        """Mean KV use, idle share and tokens/s of a replica between two times; each status holds until the next."""
        beats = [each for each in self.beats[replica] if begin <= each.at <= end]
        if len(beats) < 2:
            return 0.0, 1.0, 0.0
        times = np.diff([each.at for each in beats])
        total = float(times.sum()) or 1.0
        use = float(times @ np.array([each.kv_use for each in beats[:-1]])) / total
        busy, tokens = (counter_gain([getattr(each, name) for each in beats]) / total for name in ("busy_s", "tokens"))
        return use, max(0.0, 1.0 - busy), tokens


def counter_gain(counts: Sequence[float]) -> float:
    """What a counter has gained; a new start of a replica counts from 0."""
    gained = np.diff(counts)
    return float(gained[gained > 0].sum())
