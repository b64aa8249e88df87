"""What is known of a warm start once it is made. Free of torch: a run that finds one made need not wait for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

RECORD_FILE = "warm_start.json"
PROCEDURE = 5
"""Raised when the procedure changes: older results are then made anew."""


@dataclass(frozen=True)
class Measured:
    """Accuracies on held-out questions, 0 to 1, greedy and sampled at temperature 1, after `step` updates in all."""

    step: int
    greedy: float
    sampled: float


@dataclass(frozen=True)
class WarmStart:
    """A warm-started model in `folder`, and how good it and all that came before it were.

    `curve` has the measured checkpoints, oldest first; the last is the model in `folder`. `teacher` is the share of the
    worked answers of phase 1 that were right.
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
        """The highest greedy accuracy of any supervised checkpoint: what stopping there would have given."""
        return max(measured.greedy for measured in self.curve)

    @property
    def best_sampled(self) -> float:
        """The highest sampled accuracy of any supervised checkpoint."""
        return max(measured.sampled for measured in self.curve)


def read_warm_start(folder: Path) -> WarmStart:
    """The warm start in `folder`. Raises OSError where there is none, ValueError where its record is another's."""
    record = json.loads((folder / RECORD_FILE).read_text())
    try:
        curve = tuple(Measured(**measured) for measured in record["curve"])
        return WarmStart(folder, record["teacher"], curve, record["seconds"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / RECORD_FILE} is not the record of a warm start: {error!r}") from error
