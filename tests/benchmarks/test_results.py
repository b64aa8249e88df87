"""benchmarks/results.py: a stopped command continues with the missing results."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.results import Result, Results


def interrupted() -> Result:
    raise KeyboardInterrupt


def test_results_measure_only_missing_keys_after_a_stop(tmp_path: Path) -> None:
    file = tmp_path / "runs" / "results.json"
    first = Results(file)
    first.add("a", partial(dict, rate=1.5))
    saved = json.loads(file.read_text())
    assert saved == {"a": {"rate": 1.5, "code": saved["a"]["code"]}}, "saved before the next measurement"
    with pytest.raises(KeyboardInterrupt):
        first.add("b", interrupted)
    again = Results(file)
    assert again.get("a") == {"rate": 1.5}
    assert again.get("b") is None
    again.add("a", interrupted)  # has a result: not measured again
    again.add("b", partial(dict, rate=2.5))
    assert Results(file).get("b") == {"rate": 2.5}


def test_results_write_to_stderr_what_is_measured_and_what_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, measured = tmp_path / "results.json", partial(dict, rate=1.5)
    Results(file).add("laminar seed=0", measured)
    assert capsys.readouterr().err == "laminar seed=0: {'rate': 1.5}\n"
    Results(file).add("laminar seed=0", measured)
    assert capsys.readouterr().err == "laminar seed=0: measured before\n"
    monkeypatch.setattr(results, "SIMULATED_CODE", ())
    Results(file).add("laminar seed=0", measured)
    assert capsys.readouterr().err.endswith(f"measured before by other code; to measure again, delete {file}\n")


def test_code_hash_changes_with_the_code_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "ROOT", tmp_path)
    file = tmp_path / "a.py"
    file.write_text("x = 1")
    (tmp_path / "a.toml").write_text("y = 1")
    before = results.code_hash(tmp_path)
    (tmp_path / "a.toml").write_text("y = 2")
    assert results.code_hash(tmp_path) == before
    file.write_text("x = 2")
    assert results.code_hash(tmp_path) != before
