"""The benchmark of publications measures the stall of a trainer."""

from __future__ import annotations

from pathlib import Path

from benchmarks.models import qwen2
from benchmarks.publication import make_model, measure


def test_publication_is_measured_with_one_rank(tmp_path: Path) -> None:
    make_model(tmp_path / "model", qwen2(32, 64, 2, 8, 128, kv=4, context=64))
    found = measure(tmp_path, 1, "bfloat16", 1)
    assert found["ranks"] == 1
    assert found["MB"] > 0
    assert found["stall, ms"] > 0
