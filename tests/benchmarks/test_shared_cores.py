"""benchmarks/shared_cores.py: the mean of the steps after start-up, and a loop that must run beside another."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.measures import SETTLED_AFTER
from benchmarks.shared_cores import Loop, mean_step


def test_mean_step_is_of_the_steps_after_start_up() -> None:
    start_up = [10.0 * number for number in range(1, SETTLED_AFTER + 1)]
    assert mean_step([*start_up, start_up[-1] + 1.0, start_up[-1] + 4.0]) == 2.0
    with pytest.raises(RuntimeError, match="more than 5 are needed"):
        mean_step(start_up)


def test_loop_that_ends_early_is_no_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.shared_cores.CONTROL_MODULE", "benchmarks.no_such_module")
    with pytest.raises(RuntimeError, match="did not run"), Loop(tmp_path / "a.toml", tmp_path, 0).running():
        pass
