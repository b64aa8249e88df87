"""What a replica generates, and the time in which there was anything."""

from __future__ import annotations

from record_factories import prompt

from operators.rollout.running_request import RunningRequest, RunningRequests
from schemas.records import Assignment


def test_running_requests_measure_the_time_with_any() -> None:
    now = 10.0
    running = RunningRequests(lambda: now)
    request = RunningRequest.start(Assignment(prompt(0), 0, 1, 1, 0, 1, None, None, 0), 0, 0.0, 0)
    assert running.busy_seconds == 0.0
    running["a"] = request
    now = 12.0
    running["b"] = request
    now = 13.0
    assert running.busy_seconds == 3.0
    assert running.pop("a") is request
    now = 14.0
    assert running.pop("b") is request
    assert running.pop("b", None) is None
    now = 20.0
    assert running.busy_seconds == 4.0
    running["c"] = request
    now = 21.0
    assert running.busy_seconds == 5.0
