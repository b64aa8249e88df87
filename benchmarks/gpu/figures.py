"""A figure with its unit and, where there is one, its goal."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

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


def peak_bytes(device: str) -> int:
    """The most memory that tensors of this process have taken on `device`; 0 on a CPU."""
    return 0 if device == "cpu" else torch.cuda.max_memory_allocated()
