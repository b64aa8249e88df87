"""A calculator whose third step waits until a file exists, so that a test can act meanwhile."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from operators.rollout.environments.calculator import Calculator


class SlowCalculator(Calculator):
    """A calculator that waits for `file` in its third step."""

    def __init__(self, file: str) -> None:
        self._file, self._turns = Path(file), 0

    def step(self, text: str) -> tuple[str, float, bool, Mapping[str, Any]]:
        self._turns += 1
        while self._turns == 3 and not self._file.exists():
            time.sleep(0.02)
        observation, reward, done, info = super().step(text)
        return observation, reward + 0.25 * self._turns, done, info
