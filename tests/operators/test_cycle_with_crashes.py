"""Whatever dies, pauses or comes out of order, every trajectory is dispatched, scored and settled exactly once."""

from __future__ import annotations

import pytest
from cycle import Cycle, Shape

SHAPES = {
    "groups that fill no batch": Shape(samples=3, global_batch=7, staleness=1),
    "one replica, in step": Shape(samples=2, global_batch=4, staleness=0, processes=1),
    "a group larger than the bound": Shape(samples=6, global_batch=4, staleness=0, prompts=20),
    "two replicas a process": Shape(samples=4, global_batch=8, staleness=2, replicas=2),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_every_trajectory_ends_once(name: str, seed: int) -> None:
    cycle = Cycle(seed, SHAPES[name])
    for _ in range(1200):
        cycle.step()
    cycle.calm()
    cycle.check()
