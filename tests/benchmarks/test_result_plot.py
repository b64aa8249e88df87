"""benchmarks/result_plot.py: the plot is an SVG document of its own, with the series of a run and a legend."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import result_plot
from pipelines.inspect.run_files import METRICS_FILE, SUMMARY_FILE
from schemas.plain import encode_json
from schemas.records import Metric

SVG = "{http://www.w3.org/2000/svg}"


def test_result_plot_draws_accuracy_reward_and_supervised_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = [Metric("evaluation", step, {"accuracy/greedy": 0.2 + step / 10}, step) for step in (0, 2, 4)]
    metrics += [Metric("trainer", step, {"reward/mean": step / 5, "trajectories": 8.0 * step}, step) for step in (1, 2)]
    (tmp_path / METRICS_FILE).write_bytes(b"".join(encode_json(each) + b"\n" for each in metrics))
    (tmp_path / SUMMARY_FILE).write_text(json.dumps({"heldout_warm_start_best": 0.24}))
    target = tmp_path / "result.svg"
    monkeypatch.setattr(sys, "argv", ["result_plot", str(tmp_path), str(target)])
    result_plot.main()
    drawn = ElementTree.parse(target).getroot()
    assert drawn.tag == f"{SVG}svg"
    lines = {each.get("class"): len((each.get("points") or "").split()) for each in drawn.iter(f"{SVG}polyline")}
    assert lines == {"c0": 3, "c1": 2}
    texts = [each.text for each in drawn.iter(f"{SVG}text")]
    assert {"held-out questions, greedy", "best supervised checkpoint, greedy: 0.24"} <= set(texts)
