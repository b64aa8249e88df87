"""Whatever dies, pauses or comes out of order, every trajectory is dispatched, scored and settled exactly once."""

from __future__ import annotations

from collections import Counter

import pytest
from cycle import Cycle
from cycle_shape import Shape

from schemas.records import Assignment, Progress
from schemas.topics import INBOX, PROGRESS

SHAPES = {
    "groups that fill no batch": Shape(samples=3, global_batch=7, staleness=1),
    "one replica, in step": Shape(samples=2, global_batch=4, staleness=0, processes=1),
    "a group larger than the bound": Shape(samples=6, global_batch=4, staleness=0, prompts=20),
    "two shards of the buffer": Shape(samples=2, global_batch=4, staleness=0, shards=2),
    "two replicas a process": Shape(samples=4, global_batch=8, staleness=2, replicas=2),
}
LONG = Shape(prompts=24, samples=4, global_batch=8, staleness=2, processes=2, replicas=2, longest=40, progress_tokens=4)
MOVING = {
    "long answers": LONG,
    "synchronous": Shape(**{**vars(LONG), "schedule": "synchronous"}),
    "one_step": Shape(**{**vars(LONG), "schedule": "one_step"}),
    "stream": Shape(**{**vars(LONG), "schedule": "stream"}),
    "partial_rollout": Shape(**{**vars(LONG), "schedule": "partial_rollout"}),
    "replicas that drain": Shape(**{**vars(LONG), "drains": True}),
    "replicas that drain under partial_rollout": Shape(**{**vars(LONG), "drains": True, "schedule": "partial_rollout"}),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_every_trajectory_ends_once(name: str, seed: int) -> None:
    run(Cycle(seed, SHAPES[name]))


@pytest.mark.parametrize("name", MOVING)
def test_what_moves_or_is_lost_halfway_ends_once_and_whole(name: str) -> None:
    happened: Counter[str] = Counter()
    for seed in range(2):
        cycle = run(Cycle(seed, MOVING[name]))
        for record in cycle.log.rows(PROGRESS):
            if isinstance(record, Progress):
                happened["handed over" if record.next_owner is not None else "told"] += 1
        given = [r for r in cycle.log.rows(INBOX) if isinstance(r, Assignment) and r.partial is not None]
        happened["resumed"] += len(given)
    assert happened["told"] > 20
    assert happened["resumed"] > 5
    if name in ("long answers", "replicas that drain"):
        assert happened["handed over"] > 5


def run(cycle: Cycle) -> Cycle:
    for _ in range(1200):
        cycle.step()
    cycle.calm()
    cycle.check()
    return cycle
