"""The elastic split in virtual time: lengths that grow, and a run in which a machine moves."""

from __future__ import annotations

import argparse

from benchmarks.elastic_split import SplitRun, growing
from schemas.identity import trajectory_id


def test_lengths_grow_over_the_prompts_of_a_run() -> None:
    lengths = growing(lambda seed, name: 100, 4.0, 1000, 350)
    assert [lengths(0, trajectory_id("train", number, 0)) for number in (0, 500, 1000, 5000)] == [100, 200, 350, 350]


def test_machine_moves_to_the_side_that_is_slower() -> None:
    options = argparse.Namespace(machines=4, steps=6, growth=4.0, seed=0, notice=30.0, reform=15.0, start=15.0)
    run = SplitRun(options, 3, elastic=True)
    found = run.run("elastic")
    assert run.history[0] == 3
    assert found.changes == len(run.history) - 1 > 0
    assert min(run.history) < 3
    assert sum(each.alive for each in run._world.replicas.values()) == 4 - run.history[-1]
