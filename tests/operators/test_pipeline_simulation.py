"""Every trajectory is dispatched, scored and settled exactly once despite crashes, pauses and reordering."""

from __future__ import annotations

from collections import Counter

import pytest
from pipeline_simulation import PipelineSimulation
from simulation_config import SimulationConfig

from schemas.records import Assignment, Progress
from schemas.topics import INBOX, PROGRESS

SHAPES = {
    "groups that fill no batch": SimulationConfig(samples=3, global_batch=7, staleness=1),
    "one replica, in step": SimulationConfig(samples=2, global_batch=4, staleness=0, processes=1),
    "a group larger than the bound": SimulationConfig(samples=6, global_batch=4, staleness=0, prompts=20),
    "two shards of the buffer": SimulationConfig(samples=2, global_batch=4, staleness=0, shards=2),
    "two replicas a process": SimulationConfig(samples=4, global_batch=8, staleness=2, replicas=2),
}
LONG = SimulationConfig(
    prompts=24, samples=4, global_batch=8, staleness=2, processes=2, replicas=2, longest=40, progress_tokens=4
)
MOVING = {
    "long answers": LONG,
    "synchronous": SimulationConfig(**{**vars(LONG), "schedule": "synchronous"}),
    "one_step": SimulationConfig(**{**vars(LONG), "schedule": "one_step"}),
    "stream": SimulationConfig(**{**vars(LONG), "schedule": "stream"}),
    "partial_rollout": SimulationConfig(**{**vars(LONG), "schedule": "partial_rollout"}),
    "replicas that drain": SimulationConfig(**{**vars(LONG), "drains": True}),
    "replicas that drain under partial_rollout": SimulationConfig(
        **{**vars(LONG), "drains": True, "schedule": "partial_rollout"}
    ),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_every_trajectory_is_settled_once(name: str, seed: int) -> None:
    run(PipelineSimulation(seed, SHAPES[name]))


@pytest.mark.parametrize("name", MOVING)
def test_moved_and_lost_trajectories_are_complete(name: str) -> None:
    happened: Counter[str] = Counter()
    for seed in range(2):
        simulation = run(PipelineSimulation(seed, MOVING[name]))
        for record in simulation.log.rows(PROGRESS):
            if isinstance(record, Progress):
                happened["handed over" if record.next_owner is not None else "told"] += 1
        given = [r for r in simulation.log.rows(INBOX) if isinstance(r, Assignment) and r.partial is not None]
        happened["resumed"] += len(given)
    assert happened["told"] > 20
    assert happened["resumed"] > 5
    if name in ("long answers", "replicas that drain"):
        assert happened["handed over"] > 5


def run(simulation: PipelineSimulation) -> PipelineSimulation:
    for _ in range(1200):
        simulation.step()
    simulation.calm()
    simulation.check()
    return simulation
