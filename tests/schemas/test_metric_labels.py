"""Labels in the names of metric values, and the names of release 0.2.0."""

from __future__ import annotations

import pytest

from schemas.metric_labels import by_label, labelled, split_labels, values_by_task


@pytest.mark.parametrize(
    "task", ["sums", "", 'a "b"', "back\\slash", "two\nlines", "{braces}", 'x="y",z="', "\\n", "ü/ß"]
)
def test_labelled_name_splits_into_name_and_labels(task: str) -> None:
    assert split_labels(labelled("reward/mean", task=task)) == ("reward/mean", {"task": task})
    both = labelled("reward/mean", task=task, mode="greedy")
    assert split_labels(both) == ("reward/mean", {"task": task, "mode": "greedy"})
    assert "\n" not in both


@pytest.mark.parametrize(
    "key", ["reward/mean", "staleness/3", "refused/too long", "accuracy/greedy", "odd{task=}", "{}"]
)
def test_name_without_labels_stays_whole(key: str) -> None:
    assert split_labels(key) == (key, {})


@pytest.mark.parametrize(
    ("key", "name", "task"),
    [
        ("accuracy/greedy/sums", "accuracy/greedy", "sums"),
        ("trajectories/a/b", "trajectories", "a/b"),
        ("curriculum/level/sums", "curriculum/level", "sums"),
        ("drawn/{x}", "drawn", "{x}"),
    ],
)
def test_name_of_release_0_2_0_has_its_task(key: str, name: str, task: str) -> None:
    assert split_labels(key) == (name, {"task": task})


def test_values_are_grouped_by_task() -> None:
    values = {"reward/mean": 9.0, labelled("reward/mean", task="a"): 1.0, "trajectories/b": 2.0, "staleness/0": 3.0}
    assert by_label(values, "task") == {"a": {"reward/mean": 1.0}, "b": {"trajectories": 2.0}}
    assert values_by_task(values, "reward/mean") == {"a": 1.0}
