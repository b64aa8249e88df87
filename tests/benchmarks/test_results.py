"""benchmarks/results.py: a long command goes on where it stopped."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from benchmarks.results import Result, Results


def stopped() -> Result:
    raise KeyboardInterrupt


def test_a_command_that_was_stopped_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "runs" / "results.json"
    first = Results(file)
    first.add("a", partial(dict, rate=1.5))
    assert json.loads(file.read_text()) == {"a": {"rate": 1.5}}, "written before the next one is measured"
    with pytest.raises(KeyboardInterrupt):
        first.add("b", stopped)
    again = Results(file)
    assert again.get("a") == {"rate": 1.5}
    assert again.get("b") is None
    again.add("a", stopped)  # known: not measured a second time
    again.add("b", partial(dict, rate=2.5))
    assert Results(file).get("b") == {"rate": 2.5}


def test_each_result_is_told_as_it_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Results(tmp_path / "results.json").add("laminar seed=0", partial(dict, rate=1.5))
    assert capsys.readouterr().err == "laminar seed=0: {'rate': 1.5}\n"
