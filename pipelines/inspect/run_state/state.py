"""The state of a run: a fold over its metrics, heartbeats, phases, process states and lag.

`fold(state, event)` is pure and `RunState` is frozen, so that a view can keep a reference. Its size does not grow with
the run's length. Records may be repeated after a restart; the newest record of a step counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path

from pipelines.inspect.run_state.buffers import Values, merge_shards, with_metric
from pipelines.inspect.run_state.busy import BusyTimes, busy_shares, with_busy_time
from pipelines.inspect.run_state.curve import NO_POINTS, Curve
from pipelines.inspect.run_state.evaluation import Evaluation, merge_evaluation
from pipelines.inspect.run_state.events import (
    CheckStarted,
    LagMeasured,
    PhaseStarted,
    RolesChanged,
    RoleState,
    RunEvent,
    Tick,
    work_phase,
)
from pipelines.inspect.run_state.learning import NO_SIGNS, WARN_STEPS, LearningSigns
from pipelines.inspect.run_state.pace import BatchPace, Beat, WholeRun, newest
from schemas.metric_labels import SHARD
from schemas.records import Metric, PolicyVersion, RelayArrival, RelayStatus, ReplicaStatus, StageStatus, WeightVersion
from schemas.topics import BATCHES, OF_WORK, PAUSE, PROMPTS, STEP_COUNTERS

FIRST_PHASES = ("broker", "checks")
"""The phases in which a run starts, and starts again when it is resumed; a local broker starts after the checks."""

AT_END = ("ended", "failed", "stopped", "died")
AFTER_ROLES = ("audit", "ended", "failed", "stopped")
"""The phases of a run whose roles have ended. One that died still shows what they had not processed."""


@dataclass(frozen=True, slots=True)
class RunState:
    """A snapshot. `now` is the newest time in any event; values are the newest of their series; lag is of `OF_WORK`."""

    run: str
    goal: int | None = None
    folder: Path | None = None
    """On this machine; None if it is not known."""
    started_at: int = 0
    down_ms: int = 0  # how long it did not run since its start
    now: int = 0
    phases: tuple[PhaseStarted, ...] = ()
    check: CheckStarted | None = None
    """The check of prompts, rewards and environments that began last."""
    step: int = 0
    trainer: Values = field(default_factory=dict)
    pace: tuple[BatchPace, ...] = ()
    version: PolicyVersion | None = None
    versions: int = 0
    """The newest weight version, and how many there are, without those published again after a restart."""
    signs: LearningSigns = NO_SIGNS
    reward: Curve = NO_POINTS
    greedy: Curve = NO_POINTS
    sampled: Curve = NO_POINTS
    first_evaluation: Evaluation | None = None
    evaluation: Evaluation | None = None
    warm_start: Values = field(default_factory=dict)
    buffers: Mapping[int, Values] = field(default_factory=dict)
    """By shard of the buffer."""
    prompts: Values = field(default_factory=dict)
    scores: Mapping[int, Values] = field(default_factory=dict)
    """By shard of score."""
    pause: Values = field(default_factory=dict)
    """The newest metric of placement about a pause, see `paused_since`; empty in a run that was never paused."""
    rollout: Mapping[int, Values] = field(default_factory=dict)
    replicas: Mapping[int, ReplicaStatus] = field(default_factory=dict)
    heard_at: Mapping[int, int] = field(default_factory=dict)
    """By replica, `now` when its newest heartbeat arrived: its own clock may differ."""
    beats: Mapping[int, tuple[Beat, ...]] = field(default_factory=dict)
    """By replica, its newest heartbeats, or samples of them."""
    relays: Mapping[int, RelayStatus] = field(default_factory=dict)
    tokens_of_past_incarnations: int = 0
    steps: Mapping[tuple[str, int], Values] = field(default_factory=dict)
    """By role and shard: the counters of its steps (see `operators/io/write_transactionally.py`)."""
    busy: BusyTimes = field(default_factory=dict)
    roles: Mapping[str, RoleState] = field(default_factory=dict)
    last_metric_at: Mapping[str, int] = field(default_factory=dict)
    lag: Mapping[str, int] = field(default_factory=dict)
    inboxes: Mapping[int, int] | None = None
    """The lag of `inbox` by replica; None if it is not known."""
    undispatched: int | None = None
    """The lag of `prompts`: placement has not dispatched all their samples. None if it is not measured."""
    whole: WholeRun | None = None
    """Of a run that has ended."""

    @property
    def phase(self) -> str:
        return self.phases[-1].phase if self.phases else work_phase(self.step, self.goal)

    @property
    def batches_beyond_goal(self) -> int:
        """The lag of `batches` of a run that has trained all its steps: the trainer needs none of them."""
        return self.lag.get(BATCHES.short_name, 0) if self.goal and self.step >= self.goal else 0

    @property
    def open_lag(self) -> Mapping[str, int]:
        """The lag that somebody works on: without `batches_beyond_goal`."""
        return {**self.lag, BATCHES.short_name: 0} if self.batches_beyond_goal else self.lag

    @property
    def elapsed_s(self) -> float:
        """The seconds in which the run has run since its start."""
        return (self.now - self.started_at - self.down_ms) / 1000

    @property
    def tokens_generated(self) -> int | None:
        """Response tokens in heartbeats; without those after the last heartbeat of an incarnation."""
        if not self.replicas:
            return None
        return self.tokens_of_past_incarnations + sum(each.tokens_generated for each in self.replicas.values())

    @property
    def experience(self) -> Values:
        """The metrics of the experience buffer."""
        return merge_shards(list(self.buffers.values()) or [{}])

    @property
    def score(self) -> Values:
        """The metrics of score."""
        return merge_shards(list(self.scores.values()) or [{}])

    @property
    def busy_shares(self) -> dict[str, float]:
        """The share of the last minute in which each role worked; of a run that has ended, of all its time if known.

        A trainer that has trained all batches is idle.
        """
        if self.whole is not None:
            return dict(self.whole.busy)
        is_idle = self.step >= self.experience.get("batches", math.inf)
        return busy_shares(self.busy, self.now if is_idle else 0)

    @property
    def trajectories_trained(self) -> int | None:
        return int(self.trainer["trajectories"]) if "trajectories" in self.trainer else None

    @property
    def resumed_at(self) -> int:
        """When the run was started, or last resumed, in Unix milliseconds; 0 if it is not known."""
        return max((each.at for each in self.phases if each.phase in FIRST_PHASES), default=0)

    @property
    def paused_since(self) -> int | None:
        """Since when the run is paused, in Unix milliseconds; None if it is not."""
        return int(self.pause.get("since", 0)) if self.pause.get("paused") else None


def new_run(run: str, goal: int | None, at: int, warn_steps: int = WARN_STEPS, folder: Path | None = None) -> RunState:
    """The initial state. `goal`: the number of optimizer steps, None if the run has no such goal."""
    return RunState(run, goal, folder, started_at=at, now=at, signs=LearningSigns(warn_steps=warn_steps))


def fold(state: RunState, event: RunEvent) -> RunState:
    """The state after `event`. Metrics with unknown names are ignored. Raises TypeError if it is no event."""
    match event:
        case Metric():
            update = _steps if event.name.startswith(STEP_COUNTERS) else _SERIES.get(event.name)
            if update is None:
                return state
            if event.measured_at >= state.resumed_at:
                state = replace(state, busy=with_busy_time(state.busy, event))
            times = {
                **state.last_metric_at,
                event.name: max(event.measured_at, state.last_metric_at.get(event.name, 0)),
            }
            return replace(update(state, event), last_metric_at=times, now=max(state.now, event.measured_at))
        case WeightVersion():
            return _published(state, event.version, event.created_at)
        case ReplicaStatus():
            return _replica(state, event)
        case RelayStatus():
            return replace(state, relays={**state.relays, event.relay: event}, now=max(state.now, event.sent_at))
        case StageStatus() | RelayArrival():  # `laminar replicas` shows them
            return replace(state, now=max(state.now, event.sent_at))
        case PhaseStarted():
            repeated = bool(state.phases) and state.phases[-1].phase == event.phase
            phases = state.phases if repeated else (*state.phases, event)
            state = replace(state, phases=phases, now=max(state.now, event.at))
            if event.phase in FIRST_PHASES:  # what was measured before a resume says nothing of its rates
                return replace(state, pace=(), beats={}, busy={})
            # Roles that have ended process nothing: what is left in the log is no lag.
            return replace(state, lag={}) if event.phase in AFTER_ROLES else state
        case CheckStarted():
            return replace(state, check=event)
        case RolesChanged():
            return replace(state, roles=dict(event.roles))
        case LagMeasured():
            if state.phase in AFTER_ROLES and max(state.last_metric_at.values(), default=0) <= state.phases[-1].at:
                return state
            lag = {name: behind for name, behind in event.behind.items() if name in OF_WORK}
            return replace(state, lag=lag, inboxes=event.inbox, undispatched=event.behind.get(PROMPTS.short_name))
        case Tick():
            return replace(state, now=max(state.now, event.at))
    raise TypeError(f"not an event of a run: {type(event).__name__}")


def fold_all(state: RunState, events: Iterable[RunEvent]) -> RunState:
    """The state after all `events`."""
    return reduce(fold, events, state)


def _trainer(state: RunState, metric: Metric) -> RunState:
    values, step = metric.values, metric.step
    earlier = tuple(pace for pace in state.pace if pace.step < step)
    if len(earlier) < len(state.pace):
        earlier = ()  # it repeats steps after a restart, so the earlier times are no measure of its rate
    pace = BatchPace(step, metric.measured_at, values.get("trajectories", 0.0), tokens_of_batch(values))
    reward = state.reward.add(step, values["reward/mean"]) if "reward/mean" in values else state.reward
    # A resumed trainer makes steps again, with lower numbers.
    signs = state.signs.add(values) if step > max(state.step, state.signs.steps) else state.signs
    # An observer reads the last records before a resume again.
    steps = newest((*earlier, pace)) if pace.at >= state.resumed_at else ()
    return replace(state, step=step, trainer=values, pace=steps, reward=reward, signs=signs)


def _evaluation(state: RunState, metric: Metric) -> RunState:
    values, version = metric.values, metric.step
    last, first = state.evaluation, state.first_evaluation
    known = next((each for each in (last, first) if each and each.version == version), None)
    merged = merge_evaluation(known, metric)
    greedy, sampled = values.get("accuracy/greedy"), values.get("accuracy/sampled")
    return replace(
        state,
        evaluation=merged if last is None or version >= last.version else last,
        first_evaluation=merged if first is None or version <= first.version else first,
        greedy=state.greedy if greedy is None else state.greedy.put(version, greedy),
        sampled=state.sampled if sampled is None else state.sampled.put(version, sampled),
    )


def _published(state: RunState, version: PolicyVersion, at: int) -> RunState:
    now = max(state.now, at)
    if state.version is not None and version <= state.version:
        return replace(state, now=now)  # repeated
    return replace(state, version=version, versions=version.number + 1, now=now)


def _replica(state: RunState, status: ReplicaStatus) -> RunState:
    known = state.replicas.get(status.replica)
    if known and known.incarnation > status.incarnation:
        return state  # late heartbeat of an ended incarnation
    past, beats = state.tokens_of_past_incarnations, state.beats.get(status.replica, ())
    if known and known.incarnation < status.incarnation:
        past, beats = past + known.tokens_generated, ()
    if status.sent_at >= state.resumed_at:
        beats = newest((*beats, Beat(status.sent_at, status.tokens_generated)))
    now = max(state.now, status.sent_at)
    return replace(
        state,
        replicas={**state.replicas, status.replica: status},
        heard_at={**state.heard_at, status.replica: now},
        beats={**state.beats, status.replica: beats},
        tokens_of_past_incarnations=past,
        now=now,
    )


def _sample(state: RunState, metric: Metric) -> RunState:
    """Add a sample of a replica's heartbeats, which metrics.jsonl has instead of them."""
    if metric.measured_at < state.resumed_at:
        return state
    beats, tokens = state.beats.get(metric.step, ()), int(metric.values.get("tokens_generated", 0))
    earlier = () if beats and tokens < beats[-1].tokens else beats  # a new incarnation counts from 0
    beats = (*earlier, Beat(metric.measured_at, tokens))
    return replace(state, beats={**state.beats, metric.step: newest(beats)})


def _pause(state: RunState, metric: Metric) -> RunState:
    """Steps before the end of a pause are no measure of the rate after it."""
    ends = state.paused_since is not None and not metric.values.get("paused")
    return replace(state, pause=metric.values, pace=() if ends else state.pace)


def _steps(state: RunState, metric: Metric) -> RunState:
    shard = metric.name.removeprefix(STEP_COUNTERS), metric.step
    return replace(state, steps={**state.steps, shard: metric.values})


def tokens_of_batch(values: Values) -> float:
    """The tokens of a trainer's batch; 0 if the metric is missing."""
    return values.get("tokens", values.get("batch/tokens", 0.0))


_SERIES: Mapping[str, Callable[[RunState, Metric], RunState]] = {
    "trainer": _trainer,
    "evaluation": _evaluation,
    "rollout": lambda state, metric: replace(state, rollout={**state.rollout, metric.step: metric.values}),
    "experience": lambda state, metric: replace(state, buffers=with_metric(state.buffers, metric.values)),
    "version": lambda state, metric: _published(
        state, PolicyVersion(int(metric.values.get("epoch", 0)), metric.step), metric.measured_at
    ),
    "prompts": lambda state, metric: replace(state, prompts=metric.values),
    "score": lambda state, metric: replace(
        state, scores={**state.scores, int(metric.values.get(SHARD, 0)): metric.values}
    ),
    PAUSE: _pause,
    "warm_start": lambda state, metric: replace(state, warm_start=metric.values),
    # Metrics with these three names, and versions, are only in metrics.jsonl; a watched run emits events instead.
    "lag": lambda state, metric: fold(state, LagMeasured({name: int(of) for name, of in metric.values.items()})),
    "replica": _sample,
    "phase": lambda state, metric: fold(state, PhaseStarted(next(iter(metric.values)), metric.measured_at)),
}
