"""A run for Prometheus: `laminar_*`, in base units, from the newest snapshot of it. Never a label per trajectory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipelines.inspect.run_state.state import RunState

_NO_NAME = re.compile(r"[^a-z0-9]+")
_UNITS = {"time": "seconds", "weight_sync": "seconds"}


class RunCollector(Collector):
    """What `state` returns, asked at each scrape."""

    def __init__(self, state: Callable[[], RunState]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """The run's metrics; what is not known yet is left out."""
        state = self._state()
        yield from _families(state)


def _families(state: RunState) -> Iterator[Metric]:
    run = [state.run]
    yield _gauge("optimizer_step", "The newest optimizer step.", {(): state.step}, run)
    yield _counter("weight_versions", "Weight versions published.", {(): state.versions}, run)
    yield _counter("trajectories_trained", "Trajectories trained.", {(): state.trajectories_trained}, run)
    accuracy = {("greedy",): state.greedy.last, ("sampled",): state.sampled.last}
    known = {mode: point.y for mode, point in accuracy.items() if point}
    yield _gauge("heldout_accuracy", "Accuracy on held-out questions, of the newest version asked.", known, run, "mode")
    yield _gauge("lag_records", "Records that a topic's readers have not done.", _by(state.lag), run, "topic")
    yield from _of_replicas(state, run)
    for stage, values in (("trainer", state.trainer), ("experience", state.experience), ("score", state.score)):
        yield from _of_stage(stage, values, run)


def _of_replicas(state: RunState, run: list[str]) -> Iterator[Metric]:
    beats = state.replicas.items()
    for name, about, of in (
        ("requests_running", "Requests in a replica's batch.", lambda each: each.running),
        ("requests_waiting", "Requests that wait at a replica.", lambda each: each.waiting),
        ("kv_used_tokens", "KV cache in use.", lambda each: each.kv_used),
        ("kv_capacity_tokens", "KV cache there is.", lambda each: each.kv_capacity),
        ("step_seconds", "An engine's last step.", lambda each: each.step_seconds),
        ("heartbeat_age_seconds", "Since a replica was heard.", lambda each: max(0, state.now - each.sent_at) / 1000),
    ):
        found = {(str(number),): float(of(each)) for number, each in beats}
        yield _gauge(f"replica_{name}", about, found, run, "replica")
    tokens = {(str(number),): each.tokens_generated for number, each in beats}
    yield _counter("replica_tokens_generated", "Tokens of a replica's incarnation.", tokens, run, "replica")
    received = {(str(number),): each.received for number, each in state.relays.items()}
    sent = {(str(number),): each.sent for number, each in state.relays.items()}
    yield _counter("relay_received_bytes", "Weight bytes that a relay has received.", received, run, "relay")
    yield _counter("relay_sent_bytes", "Weight bytes that a relay has sent.", sent, run, "relay")


def _of_stage(stage: str, values: Mapping[str, float], run: list[str]) -> Iterator[Metric]:
    """All that a role measures, under its own name: `reward/mean` of the trainer is laminar_trainer_reward_mean."""
    for name, value in sorted(values.items()):
        yield _gauge(exposed(stage, name), f"{name}, as the {stage} says it.", {(): value}, run)


def exposed(stage: str, name: str) -> str:
    """The name, without prefix, under which a role's measure is exposed."""
    unit = _UNITS.get(name.partition("/")[0], "")
    words = [stage, _NO_NAME.sub("_", name.lower()).strip("_"), unit if unit and not name.endswith(unit) else ""]
    return "_".join(word for word in words if word)


Values = Mapping[Any, float | int | None]
"""By the values of the labels, a tuple."""


def _gauge(name: str, about: str, values: Values, run: list[str], *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(f"laminar_{name}", about, labels=["run", *labels]), values, run)


def _counter(name: str, about: str, values: Values, run: list[str], *labels: str) -> Metric:
    return _filled(CounterMetricFamily(f"laminar_{name}", about, labels=["run", *labels]), values, run)


def _filled(family: Any, values: Values, run: list[str]) -> Metric:
    for labels, value in values.items():
        if value is not None:
            family.add_metric([*run, *labels], value)
    filled: Metric = family
    return filled


def _by(values: Mapping[str, int]) -> Values:
    return {(name,): value for name, value in values.items()}
