"""The elastic split: how the work of both sides decides it, and a run in which a machine moves."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.elastic_split import SplitRun, Work, best_split, changed_split, growing
from schemas.identity import trajectory_id


@pytest.mark.parametrize(("trainer", "rollouts", "best"), [(100, 100, 4), (300, 100, 6), (100, 700, 1), (1000, 1, 7)])
def test_split_gives_each_side_the_share_of_its_work(trainer: float, rollouts: float, best: int) -> None:
    assert best_split(Work(trainer, rollouts, 1.0), 8) == best


def test_split_changes_only_for_a_gain() -> None:
    assert changed_split(Work(100, 100, 50.0), 2, 8) == 4  # 25 s instead of 50
    assert changed_split(Work(100, 100, 26.0), 5, 8) == 5  # 25 s instead of 26


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
