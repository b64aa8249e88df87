"""The soak campaign as tests: `make soak`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from campaign import campaign, processes_killed, run_killed, run_stopped

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3 * 3600)]


@pytest.mark.parametrize(
    ("name", "scenario", "seeds"),
    [
        ("killed", partial(processes_killed, kills=20), 1),
        ("gone", run_killed, 10),
        ("stopped", run_stopped, 20),
    ],
)
def test_nothing_is_lost_and_nothing_is_left(name: str, scenario: object, seeds: int, tmp_path: Path) -> None:
    results = campaign(tmp_path, {name: scenario}, seeds)  # type: ignore[dict-item]
    assert len(results) == seeds
    assert not {cell: found["error"] for cell, found in results.items() if "error" in found}
