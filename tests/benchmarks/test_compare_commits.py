"""benchmarks/compare_commits.py: a module runs in both checkouts by turns, and a figure of its JSON is compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import compare_commits

FIGURE = "import json, sys; print(json.dumps({{'rows': [{{'us': {us} + float(sys.argv[1])}}]}}))"


def test_compare_commits_compares_a_figure_of_two_checkouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, us in (("before", 100), ("after", 150)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "figures.py").write_text(FIGURE.format(us=us))
    sides = [str(tmp_path / name) for name in ("before", "after")]
    options = ["--rounds", "3", "--figure", "rows.0.us", "--json", "--", "figures", "50"]
    monkeypatch.setattr(sys, "argv", ["compare_commits", *sides, *options])
    compare_commits.main()
    found = json.loads(capsys.readouterr().out)
    assert (found["before"], found["after"], found["ratio"]) == (150.0, 200.0, pytest.approx(4 / 3))


def test_compare_takes_the_median_of_the_ratios_of_rounds() -> None:
    found = compare_commits.compare([(1.0, 1.0), (10.0, 11.0), (2.0, 6.0)])
    assert (found["ratio"], found["lower_quartile"], found["upper_quartile"]) == (1.1, 1.0, 3.0)
    assert compare_commits.compare([(2.0, 3.0)])["ratio"] == 1.5


def test_lookup_adds_the_numbers_by_name_where_the_path_ends() -> None:
    assert compare_commits.lookup({"cells": [{"cpu": {"kafka": 1.5, "trainer": 2}}]}, "cells.0.cpu") == 3.5


def test_over_model_divides_by_the_cpu_time_in_model_code() -> None:
    cell = {"cpu_seconds_per_batch": {"kafka": 1.0, "rollout-0": 2.0}, "outside_model": {"rollout-0": 0.25}}
    assert compare_commits.over_model({"cells": {"A/0/laminar": cell}}, "cells.A/0/laminar") == 2.0
