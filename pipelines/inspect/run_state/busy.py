"""How busy each role is: the share of the time in which it works, from its metrics.

The trainer works while it updates and publishes; a replica while it has trajectories; another role in the phases of its
steps. What works nearly all of the time limits the run, and the others wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from schemas.records import Metric
from schemas.topics import PHASE_SECONDS, STEP_COUNTERS

WINDOW_MS = 60_000
POINT_MS = 1_000
SHORT_MS = 20_000
STOPPED_MS = 30_000
"""No process of a running run is silent for so long: rollouts measure themselves whatever the others do."""
SLOWEST = 0.5
"""A role that works for a smaller share of the time limits nothing."""
SHOWN = 0.05
TRAINER, ROLLOUT = "trainer", "rollout"


class BusyPoint(NamedTuple):
    """By the time `at`: the seconds of work since the first point, and the last counter of the process."""

    at: int
    seconds: float
    counter: float


BusyTimes = Mapping[tuple[str, int], tuple[BusyPoint, ...]]
"""By role and its shard or process, of the last `WINDOW_MS`."""


def with_busy_time(times: BusyTimes, metric: Metric, window_ms: float = WINDOW_MS) -> BusyTimes:
    """`times` with what `metric` says of them."""
    role = metric.name.removeprefix(STEP_COUNTERS)
    counts = metric.name.startswith(STEP_COUNTERS)
    if counts == (role in (TRAINER, ROLLOUT)):  # these two measure it themselves: an emulated one has no such phases
        return times
    key = (role, 0 if role == TRAINER else metric.step)
    points = times.get(key, ())
    last = points[-1] if points else BusyPoint(metric.measured_at, 0.0, 0.0)
    if metric.measured_at < last.at:
        return times
    counter = 0.0
    if counts:
        counter = sum(value for name, value in metric.values.items() if name.startswith(PHASE_SECONDS))
        worked = counter - last.counter if counter >= last.counter else counter  # a restarted process counts from 0
    elif role == TRAINER:
        worked = metric.values.get("time/update", 0.0) + metric.values.get("weight_sync/seconds", 0.0)
    else:
        worked = (1 - metric.values.get("rollout/idle_ratio", 1.0)) * (metric.measured_at - last.at) / 1000
    added = BusyPoint(metric.measured_at, last.seconds + worked if points else 0.0, counter)
    if len(points) > 1 and added.at - points[-2].at < POINT_MS:
        points = points[:-1]
    return {**times, key: _extended(points, added, window_ms)}


def _extended(points: tuple[BusyPoint, ...], added: BusyPoint, window_ms: float) -> tuple[BusyPoint, ...]:
    points = (*points, added)
    while len(points) > 2 and added.at - points[1].at >= window_ms:
        points = points[1:]
    return points


def busy_shares(times: BusyTimes, trainer_idle_until: int = 0) -> dict[str, float]:
    """The share of the time in which each role worked, that of its busiest shard or process; the busiest role first.

    The trainer has measured nothing since its last update; if it is known to be idle since then, give that time, in
    Unix milliseconds.
    """
    shares: dict[str, float] = {}
    for (role, _), points in times.items():
        if role == TRAINER and trainer_idle_until > points[-1].at:
            points = _extended(points, points[-1]._replace(at=trainer_idle_until), WINDOW_MS)
        if points[-1].at > points[0].at:
            share = (points[-1].seconds - points[0].seconds) / ((points[-1].at - points[0].at) / 1000)
            shares[role] = max(shares.get(role, 0.0), min(1.0, share))
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def busy_shares_of(metrics: Iterable[Metric]) -> dict[str, float]:
    """`busy_shares` of a whole run: between its first and its last optimizer step, without the time it was stopped.

    Empty for less than `SHORT_MS`, in which what was generated before the first step is trained.
    """
    metrics = sorted(metrics, key=lambda metric: metric.measured_at)
    steps = [metric.measured_at for metric in metrics if metric.name == TRAINER]
    times: BusyTimes = {}
    stopped_ms, before = 0, 0
    if not steps or steps[-1] - steps[0] < SHORT_MS:
        return {}
    for metric in metrics:
        if steps[0] <= metric.measured_at <= steps[-1]:
            if before and metric.measured_at - before > STOPPED_MS:
                stopped_ms += metric.measured_at - before
            before = metric.measured_at
            times = with_busy_time(times, replace(metric, measured_at=before - stopped_ms), float("inf"))
    return busy_shares(times)


def busy_text(shares: Mapping[str, float], time: str = "the time between the first step and the last") -> str:
    """Return `score 98 % of TIME (the bottleneck), rollout 41 %, trainer 12 %`; empty if nothing is known."""
    shown = [(role, share) for role, share in shares.items() if share >= SHOWN or role in (TRAINER, ROLLOUT)]
    texts = [f"{role} {100 * share:.0f} %" for role, share in shown]
    if not texts:
        return ""
    texts[0] += f" of {time}" + (" (the bottleneck)" if shown[0][1] >= SLOWEST else "")
    return ", ".join(texts)
