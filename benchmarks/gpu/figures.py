"""A figure with its unit and, where there is one, its goal."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

BETTER = {"<=": lambda value, bound: value <= bound, ">=": lambda value, bound: value >= bound}


@dataclass(frozen=True, slots=True)
class Figure:
    """`value` in `unit`; `goal` is a comparison with a bound, such as (">=", 0.95), and `note` what explains it."""

    name: str
    value: float
    unit: str
    goal: tuple[str, float] | None = None
    note: str = ""

    @property
    def passed(self) -> bool | None:
        """Whether the goal is reached; None without a goal."""
        return None if self.goal is None else bool(BETTER[self.goal[0]](self.value, self.goal[1]))

    def as_json(self) -> dict[str, Any]:
        """The figure for the JSON file; a value that could not be measured is null."""
        return asdict(self) | {"passed": self.passed, "value": None if math.isnan(self.value) else self.value}


def figure_of(entry: dict[str, Any]) -> Figure:
    """The figure that `as_json` made `entry` of."""
    goal = None if entry["goal"] is None else (entry["goal"][0], entry["goal"][1])
    value = math.nan if entry["value"] is None else float(entry["value"])
    return Figure(entry["name"], value, entry["unit"], goal, entry["note"])


def synchronize(device: str) -> None:
    """Wait until `device` has finished all work."""
    if device != "cpu":
        torch.cuda.synchronize()


def seconds(device: str, call: Callable[[], object], repetitions: int, warm_ups: int = 1) -> float:
    """The median time of `call` on `device`, its work there included."""
    taken = []
    for _ in range(warm_ups + repetitions):
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[warm_ups:])


def busy(device: str, call: Callable[[], object]) -> list[Figure]:
    """The share of the time of `call` in which a GPU computes or copies, with the kernels that take longest; nothing on
    a CPU."""
    if device == "cpu":
        return []
    synchronize(device)
    began = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        synchronize(device)
        took = 1e6 * (time.perf_counter() - began)
    spans = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    longest = Counter[str]()
    for start, end, name in spans:
        longest[name.removeprefix("void ")[:40]] += end - start
    note = ", ".join(f"{name} {each / 1e3:.0f} ms" for name, each in longest.most_common(6))
    return [Figure("GPU busy", 100 * union((start, end) for start, end, _ in spans) / took, "%", note=note)]


def union(spans: Iterable[tuple[float, float]]) -> float:
    """The length that `spans` cover, however they overlap."""
    covered, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def peak_bytes(device: str) -> int:
    """The most memory that tensors of this process have taken on `device`; 0 on a CPU."""
    return 0 if device == "cpu" else torch.cuda.max_memory_allocated()
