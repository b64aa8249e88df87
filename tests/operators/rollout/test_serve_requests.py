"""Requests of people under weight versions: their order, their versions, and requests that cannot run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from record_factories import SAMPLING, version
from scripted_engine import ScriptedEngine, ScriptedWeights

from operators.rollout.serve_requests import ServedRequest, ServedRequests, StreamEvent, find_version

VERSIONS = [version(1), version(2), version(2, epoch=2)]


def served(engine: ScriptedEngine, numbers: Sequence[int] = (1, 2)) -> ServedRequests:
    weights = ScriptedWeights()
    for number in numbers:
        weights.add(version(number))
    return ServedRequests(engine, weights)


def request(name: str, of: str, tokens: int = 3) -> ServedRequest:
    return ServedRequest(name, of, np.ones(tokens, np.int32), SAMPLING)


def events_of(it: ServedRequests) -> list[StreamEvent]:
    events: list[StreamEvent] = []
    while len(it):
        events += it.step()
    return events


@pytest.mark.parametrize(
    ("name", "expected"), [("latest", "2.2"), ("v1", "1.1"), ("v2", "2.2"), ("1.2", "1.2"), ("2.2", "2.2")]
)
def test_find_version_reads_names_of_versions(name: str, expected: str) -> None:
    assert str(find_version(name, VERSIONS)) == expected


@pytest.mark.parametrize("name", ["v9", "9.9", "", "newest", "v"])
def test_find_version_names_what_there_is(name: str) -> None:
    with pytest.raises(LookupError, match=r"it has 1\.1, 1\.2, 2\.2"):
        find_version(name, VERSIONS)


def test_requests_stream_and_end() -> None:
    it = served(ScriptedEngine(steps=lambda name: 3))
    it.submit(request("a", "latest"))
    events = events_of(it)
    assert [(each["tokens"], each["finish"]) for each in events] == [([2], None), ([2], None), ([2], "stop")]
    assert {each["version"] for each in events} == {"1.2"}


def test_a_version_is_loaded_once_the_engine_is_empty() -> None:
    engine = ScriptedEngine(steps=lambda name: 2)
    it = served(engine)
    for name, of in (("a", "v1"), ("b", "v2"), ("c", "v1")):
        it.submit(request(name, of))
    ended = [(each["id"], each["version"]) for each in events_of(it) if each["finish"]]
    assert ended == [("a", "1.1"), ("b", "1.2"), ("c", "1.1")]
    assert engine.loads == [version(1), version(2), version(1)]


def test_requests_of_one_version_run_together() -> None:
    engine = ScriptedEngine(slots=4, steps=lambda name: 5)
    it = served(engine)
    for name in "abc":
        it.submit(request(name, "latest"))
    assert len(it.step()) == 3
    assert engine.loads == [version(2)]


def test_a_request_that_cannot_run_fails_alone() -> None:
    it = served(ScriptedEngine())
    it.submit(request("a", "v7"))
    it.submit(request("b", "latest", tokens=99))
    it.submit(request("c", "latest"))
    errors = {each["id"]: each["error"] for each in events_of(it) if each["finish"]}
    assert "no weight version 'v7'" in errors["a"]
    assert "leaves no room" in errors["b"]
    assert errors["c"] is None


def test_a_cancelled_request_returns_nothing() -> None:
    it = served(ScriptedEngine(steps=lambda name: 9))
    it.submit(request("a", "latest"))
    it.submit(request("b", "v1"))
    it.step()
    it.cancel("a")
    it.cancel("b")
    assert len(it) == 0
    assert it.step() == []
