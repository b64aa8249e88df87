"""CPU time of a run's processes by role, and of all other processes, as the operating system counts it."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

EVERY_S = 1.0


class OthersWatch:
    """Measures the CPU time of the cores that this process may use, spent by others than it and its descendants."""

    def __init__(self) -> None:
        self._idle, self._total = _core_seconds()
        self._own = _own_seconds()

    def share(self) -> float:
        """The share of their CPU time, 0 to 1. Call it before descendants are orphaned: then they count too."""
        idle, total = (now - before for now, before in zip(_core_seconds(), (self._idle, self._total), strict=True))
        return max(0.0, (total - idle - (_own_seconds() - self._own)) / total) if total else 0.0


def _core_seconds() -> tuple[float, float]:
    """Idle and all seconds of the cores that this process may use."""
    cores = os.sched_getaffinity(0)
    used = [times for core, times in enumerate(psutil.cpu_times(percpu=True)) if core in cores]
    return sum(times.idle + getattr(times, "iowait", 0.0) for times in used), sum(map(sum, used))


def _own_seconds() -> float:
    """CPU seconds of this process and all its descendants, running or waited for."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(each.ru_utime + each.ru_stime for each in used)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


class CpuWatch:
    """Samples once a second the CPU time of `pid` and its descendants, by role of the run in `folder`."""

    def __init__(self, pid: int, folder: Path) -> None:
        self._root, self._folder = psutil.Process(pid), folder
        self._samples: list[tuple[float, Mapping[str, float]]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> CpuWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def between(self, begin: float, end: float) -> tuple[float, float, dict[str, float]] | None:
        """Times of the first sample from `begin` and the last until `end` (Unix seconds), and the CPU seconds between
        them, by role. None with fewer than two samples."""
        inside = [sample for sample in self._samples if begin <= sample[0] <= end]
        if len(inside) < 2:
            return None
        (first_at, first), (last_at, last) = inside[0], inside[-1]
        return first_at, last_at, {role: last[role] - first[role] for role in last if role in first}

    def _watch(self) -> None:
        while not self._ended.wait(EVERY_S):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._samples.append((time.time(), self._sample()))

    def _sample(self) -> dict[str, float]:
        roles: dict[int, str] = {self._root.pid: "supervisor"}
        with contextlib.suppress(OSError, ValueError):
            state = json.loads((self._folder / "state.json").read_text("utf-8"))
            roles |= {role["pid"]: name for name, role in state["roles"].items() if role["pid"]}
        seconds: dict[str, float] = {}
        for process in [self._root, *self._root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                role = roles.get(process.pid) or ("kafka" if process.name() == "java" else "others")
                used = process.cpu_times()
                seconds[role] = seconds.get(role, 0.0) + used.user + used.system
        return seconds
