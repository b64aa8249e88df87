"""Prometheus metrics of a run: `laminar_*`, in base units, from its newest state, and the server of them.

There is no label per trajectory.
"""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from prometheus_client import make_asgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from infra.http_server import HEADER_S, Connections, HttpServer
from pipelines.inspect.audit.result import FINDINGS
from pipelines.inspect.run_state.errors import error_counts
from pipelines.inspect.run_state.state import RunState
from pipelines.present.view.metric_texts import counter_text, metric_text
from schemas.metric_labels import split_labels

_INVALID_IN_NAMES = re.compile(r"[^a-z0-9]+")
_LABELS = {"read": "topic", "written": "topic", "time": "phase", "settled": "outcome"}
"""Labels of the counters of steps; of all others it is the reason."""
_UNITS = {"time": "seconds", "weight_sync": "seconds"}


class RunCollector(Collector):
    """Collects the metrics of the state that `state` returns at each scrape, and of the last audit, see `Audit`."""

    def __init__(
        self, state: Callable[[], RunState], audit: Callable[[], Mapping[str, Any]] = lambda: MappingProxyType({})
    ) -> None:
        self._state, self._audit = state, audit

    def collect(self) -> Iterator[Metric]:
        """Yield the run's metrics, without unknown values."""
        state = self._state()
        yield from _families(state)
        if audit := self._audit():
            yield from _of_audit(audit, [state.run])


def _families(state: RunState) -> Iterator[Metric]:
    run = [state.run]
    yield _gauge("optimizer_step", "Number of the newest optimizer step.", {(): state.step}, run)
    if state.pause:
        yield _gauge("paused", "1 while the run is paused, else 0.", {(): state.pause.get("paused")}, run)
    about = "Published weight versions: the number of the newest plus one."
    yield _counter("weight_versions", about, {(): state.versions}, run)
    trained = {(): state.trajectories_trained}
    yield _counter("trajectories_trained", "Trajectories trained since the start of the run.", trained, run)
    about = "Accuracy of the newest evaluated version on held-out questions"
    modes = {"greedy": state.greedy.last, "sampled": state.sampled.last}
    overall = {(mode,): point.y for mode, point in modes.items() if point}
    yield _gauge("heldout_accuracy", f"{about} of all tasks, 0 to 1.", overall, run, "mode")
    yield _gauge("heldout_task_accuracy", f"{about} of a task, 0 to 1.", _by_task(state), run, "mode", "task")
    about = "Share of scored training trajectories whose reward, environment or generation failed, 0 to 1."
    yield _gauge("error_share", about, {(): error_counts(state.score).share}, run)
    lag = {(topic,): records for topic, records in state.open_lag.items()}
    yield _gauge("lag_records", "Records of a topic that its consumers have not processed.", lag, run, "topic")
    yield from _of_replicas(state, run)
    for stage in ("prompts", "trainer", "experience", "score"):
        yield from _of_stage(stage, getattr(state, stage), run)
    yield from _of_steps(state.steps, run)


def _of_audit(audit: Mapping[str, Any], run: list[str]) -> Iterator[Metric]:
    yield _gauge("audit_passed", "1 if the last audit passed, 0 if it failed.", {(): int(audit["passed"])}, run)
    about = "Unix time at which the last audit ended, in seconds. Its result stays until another audit ends."
    yield _gauge("audit_timestamp_seconds", about, {(): audit["ended_at"]}, run)
    found = {(name,): audit[name] for name in FINDINGS}
    yield _gauge("audit_findings", "Trajectories that the last audit names, by finding.", found, run, "finding")


def _by_task(state: RunState) -> SampleValues:
    if (newest := state.evaluation) is None:
        return {}
    modes = {"greedy": newest.by_task, "sampled": newest.sampled_by_task}
    return {(mode, task): value for mode, found in modes.items() for task, value in found.items()}


def _of_replicas(state: RunState, run: list[str]) -> Iterator[Metric]:
    statuses = state.replicas.items()
    for name, about, value in (
        ("requests_running", "Requests in a replica's batch.", lambda each: each.running),
        ("requests_waiting", "Requests waiting at a replica.", lambda each: each.waiting),
        ("kv_used_tokens", "KV cache tokens in use.", lambda each: each.kv_used),
        ("kv_capacity_tokens", "KV cache capacity in tokens.", lambda each: each.kv_capacity),
        ("step_seconds", "Duration of the engine's last step, in seconds.", lambda each: each.step_seconds),
        (
            "heartbeat_age_seconds",
            "Time since a replica's last heartbeat, in seconds.",
            lambda each: max(0, state.now - each.sent_at) / 1000,
        ),
    ):
        found = {(str(number),): float(value(each)) for number, each in statuses}
        yield _gauge(f"replica_{name}", about, found, run, "replica")
    tokens = {(str(number),): each.tokens_generated for number, each in statuses}
    about = "Tokens generated by a replica since its start."
    yield _counter("replica_tokens_generated", about, tokens, run, "replica")
    received = {(str(number),): each.received for number, each in state.relays.items()}
    sent = {(str(number),): each.sent for number, each in state.relays.items()}
    yield _counter("relay_received_bytes", "Weight bytes received by a relay.", received, run, "relay")
    yield _counter("relay_sent_bytes", "Weight bytes sent by a relay.", sent, run, "relay")


def _of_steps(steps: Mapping[tuple[str, int], Mapping[str, float]], run: list[str]) -> Iterator[Metric]:
    """Yield the counters of all steps: `moved/repack` of placement is laminar_steps_moved_total{reason="repack"}."""
    kinds: dict[str, dict[tuple[str, ...], float]] = {}
    for (role, shard), values in steps.items():
        for name, value in values.items():
            kind, _, label = name.partition("/")
            kinds.setdefault(kind, {})[role, str(shard), label] = value
    for kind, found in sorted(kinds.items()):
        name = metric_name("steps", f"{kind}/")
        yield _counter(name, counter_text(kind), found, run, "role", "shard", _LABELS.get(kind, "reason"))


_SUMS = {("score", "trajectories")}
"""Sums of values with labels: beside them, Prometheus would count each trajectory twice."""


def _of_stage(stage: str, values: Mapping[str, float], run: list[str]) -> Iterator[Metric]:
    """Yield all values of a role under its name: `reward/mean` of the trainer is laminar_trainer_reward_mean. A value
    with labels has them: `reward/mean{task="sums"}` of experience is laminar_experience_reward_mean{task="sums"}."""
    names: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for key, value in values.items():
        name, labels = split_labels(key)
        if labels or (stage, name) not in _SUMS:
            names.setdefault(name, []).append((labels, value))
    for name, found in sorted(names.items()):
        kinds = list(dict.fromkeys(label for own, _ in found for label in own))
        by_labels = {tuple(own.get(label, "") for label in kinds): value for own, value in found}
        yield _gauge(metric_name(stage, name), metric_text(stage, name), by_labels, run, *kinds)


def metric_name(stage: str, name: str) -> str:
    """Return the Prometheus name of a role's value, without the prefix."""
    unit = _UNITS.get(name.partition("/")[0], "")
    plain = _INVALID_IN_NAMES.sub("_", name.lower()).strip("_")
    parts = [stage, plain, unit if unit and not name.endswith(unit) else ""]
    return "_".join(part for part in parts if part)


SampleValues = Mapping[Any, float | int | None]
"""Values by the tuple of their label values."""


def _gauge(name: str, about: str, values: SampleValues, run: list[str], *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(f"laminar_{name}", about, labels=["run", *labels]), values, run)


def _counter(name: str, about: str, values: SampleValues, run: list[str], *labels: str) -> Metric:
    return _filled(CounterMetricFamily(f"laminar_{name}", about, labels=["run", *labels]), values, run)


def _filled(family: Any, values: SampleValues, run: list[str]) -> Metric:
    for labels, value in values.items():
        if value is not None:
            family.add_metric([*run, *labels], value)
    filled: Metric = family
    return filled


MAX_CONNECTIONS = 64
"""A new connection above it replaces the oldest of the address that has most: a flood does not stop the scrapes."""
_END_S = 10.0


@contextmanager
def serving_metrics(
    metrics: Collector, host: str, port: int, most: int = MAX_CONNECTIONS, header_s: float = HEADER_S
) -> Iterator[int]:
    """Serve `metrics` at `host`:`port` (0: a free port) from a thread during the context; its value is the port.

    At most `most` connections may be open, and a request's header must arrive within `header_s` seconds. Raises OSError
    if the address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listening:
        server = HttpServer(_metrics_application(metrics), Connections(most), header_s=header_s)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), name="metrics", daemon=True)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(_END_S)


def _metrics_application(metrics: Collector) -> Any:
    """An ASGI application that answers each request with `metrics`, and reads no body."""
    application = make_asgi_app(metrics)

    async def no_body() -> dict[str, str]:
        return {"type": "http.request"}

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await application(scope, no_body, send)

    return answer
