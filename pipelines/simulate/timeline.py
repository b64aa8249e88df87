"""A history as a timeline: text, and a trace for Perfetto with a track for each role."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipelines.simulate.world import SimulatedHistory


def lines(history: SimulatedHistory, first: int = 0) -> Iterator[str]:
    """One line for each event from the one with number `first` on: time, role, what happened."""
    width = max((len(role) for _, role, _ in history.events), default=0)
    for at, role, text in history.events[first:]:
        yield f"{at:9.3f} s  {role:{width}}  {text}"


def trace(history: SimulatedHistory) -> dict[str, Any]:
    """The events in the format of chrome://tracing and Perfetto; times in microseconds of virtual time."""
    roles = sorted({role for _, role, _ in history.events})
    tracks = {role: number for number, role in enumerate(roles, 1)}
    names = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": role}}
        for role, number in tracks.items()
    ]
    faults = [
        {
            "ph": "X",
            "name": fault.kind,
            "cat": "fault",
            "pid": 1,
            "tid": tracks.get(fault.role, 0),
            "ts": fault.at * 1e6,
            "dur": fault.seconds * 1e6,
        }
        for fault in history.faults
    ]
    instants = [
        {"ph": "i", "s": "t", "name": text, "pid": 1, "tid": tracks[role], "ts": at * 1e6}
        for at, role, text in history.events
    ]
    return {"traceEvents": [*names, *faults, *instants], "displayTimeUnit": "ms"}
