"""The order in which a real run begins the prompts of a data set."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.length_order import ORDERS, WINDOW, _spread, ordered_groups, write_lengths
from benchmarks.length_prediction import GROUP, DataSet
from operators.rollout.emulation_config import LengthsConfig
from operators.rollout.response_lengths import open_lengths


@pytest.fixture
def data() -> DataSet:
    """Prompt n has responses of n + 1 tokens in each epoch."""
    prompts = WINDOW // 2
    return DataSet(np.tile(np.arange(1, prompts + 1)[None, :, None], (2, 1, GROUP)))


def test_windows_have_the_longest_first(data: DataSet) -> None:
    for order, first in (("log order", 1), ("by true means", WINDOW // 2)):
        groups = list(ordered_groups(data, order, 2 * WINDOW))
        assert [int(groups[n][0]) for n in (0, WINDOW)] == [first, first]
    orders = {order: [int(each[0]) for each in ordered_groups(data, order, WINDOW)] for order in ORDERS}
    for lengths in orders.values():
        assert sorted(lengths) == sorted(2 * list(range(1, WINDOW // 2 + 1)))
    assert orders["by earlier epochs, spread"] != orders["by earlier epochs"]


def test_prediction_knows_earlier_epochs_only(data: DataSet) -> None:
    """Half of the window are the prompts' first responses, of which nothing is known: the mean of the others."""
    groups = [int(lengths[0]) for lengths in ordered_groups(data, "by earlier epochs", WINDOW)]
    first, mean = groups.index(1), np.exp(np.log(np.arange(1, WINDOW // 2 + 1)).mean())
    unknown = groups[first : first + WINDOW // 2]
    assert unknown == list(range(1, WINDOW // 2 + 1))
    assert groups[0] == WINDOW // 2
    assert all(length >= mean / 2 for length in groups[:first])


def test_spread_gives_no_replica_all_long_groups() -> None:
    """Each batch of two groups is every second of the next four in the log, by rank; the last is all that is left."""
    assert _spread([5, 4, 3, 2, 1, 0], batch=2) == [3, 1, 5, 2, 4, 0]
    assert _spread([1, 0], batch=2) == [1, 0]


def test_engine_reads_the_lengths_of_an_order(data: DataSet, tmp_path: Path) -> None:
    write_lengths(tmp_path / "lengths.jsonl", ordered_groups(data, "by true means", 3))
    assert len([json.loads(line) for line in (tmp_path / "lengths.jsonl").read_text().splitlines()]) == 3 * GROUP
    lengths = open_lengths(LengthsConfig(file=str(tmp_path / "lengths.jsonl")))
    assert [lengths(0, f"p{number}.{GROUP - 1}") for number in range(3)] == [3, 2, 1]
