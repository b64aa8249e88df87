"""The record of a finished warm start. It does not import torch: a run that finds a cached one starts fast."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

RECORD_FILE = "warm_start.json"
PROCEDURE = 6
"""Incremented when the procedure changes, which invalidates cached results."""


@dataclass(frozen=True)
class Measured:
    """Accuracies on held-out questions, 0 to 1, greedy and sampled at temperature 1, after `step` updates."""

    step: int
    greedy: float
    sampled: float


@dataclass(frozen=True)
class WarmStart:
    """A warm-started model in `folder`, and the measured accuracies.

    `curve` has the measurements, oldest first; the last is of the model in `folder`. `teacher` is the share of correct
    worked answers in phase 1. `seconds` is the duration.
    """

    folder: Path
    teacher: float
    curve: tuple[Measured, ...]
    seconds: float

    @property
    def greedy(self) -> float:
        """Greedy accuracy of the model in `folder`."""
        return self.curve[-1].greedy

    @property
    def sampled(self) -> float:
        """Sampled accuracy of the model in `folder`."""
        return self.curve[-1].sampled

    @property
    def best(self) -> float:
        """The highest greedy accuracy of any measurement: the supervised baseline."""
        return max(measured.greedy for measured in self.curve)


def read_warm_start(folder: Path) -> WarmStart:
    """Read the warm start in `folder`. Raises OSError if there is none, ValueError for an invalid record."""
    record = json.loads((folder / RECORD_FILE).read_text())
    try:
        curve = tuple(Measured(**measured) for measured in record["curve"])
        return WarmStart(folder, record["teacher"], curve, record["seconds"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / RECORD_FILE} is not the record of a warm start: {error!r}") from error
