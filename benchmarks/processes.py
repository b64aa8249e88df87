"""CPU time of a run's processes by role, and of everybody else's, as the operating system counts it."""

from __future__ import annotations

import contextlib
import json
import resource
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import psutil

EVERY_S = 1.0


class OthersWatch:
    """What processes that this one neither is nor has started used of the machine while it lasted."""

    def __init__(self) -> None:
        self._all, self._own = psutil.cpu_times(), _own_seconds()

    def share(self) -> float:
        """Of the machine's CPU time, 0 to 1. Ask before what was started is orphaned: then it counts as others'."""
        now = psutil.cpu_times()
        whole = sum(now) - sum(self._all)
        idle = now.idle - self._all.idle + getattr(now, "iowait", 0.0) - getattr(self._all, "iowait", 0.0)
        return max(0.0, (whole - idle - (_own_seconds() - self._own)) / whole) if whole else 0.0


def _own_seconds() -> float:
    """Of this process and all that it has started, whether it lives or has been waited for."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(each.ru_utime + each.ru_stime for each in used)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


class CpuWatch:
    """Looks once a second at all processes under `pid`, whose run is in `folder`, and tells them by role."""

    def __init__(self, pid: int, folder: Path) -> None:
        self._root, self._folder = psutil.Process(pid), folder
        self._seen: list[tuple[float, Mapping[str, float]]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> CpuWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def between(self, begin: float, end: float) -> tuple[float, float, dict[str, float]] | None:
        """The first look at or after `begin` and the last before `end` (Unix seconds), and CPU seconds between, by
        role. None where there are no two looks."""
        inside = [look for look in self._seen if begin <= look[0] <= end]
        if len(inside) < 2:
            return None
        (first_at, first), (last_at, last) = inside[0], inside[-1]
        return first_at, last_at, {role: last[role] - first[role] for role in last if role in first}

    def _watch(self) -> None:
        while not self._ended.wait(EVERY_S):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._seen.append((time.time(), self._look()))

    def _look(self) -> dict[str, float]:
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
