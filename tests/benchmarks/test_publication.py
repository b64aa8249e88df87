"""The benchmark of publications measures the stall of a trainer."""

from __future__ import annotations

from pathlib import Path

from benchmarks.publication import make_model, measure

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}


def test_publication_is_measured_with_one_rank(tmp_path: Path) -> None:
    make_model(tmp_path / "model", TINY)
    found = measure(tmp_path, 1, "bfloat16", 1)
    assert found["ranks"] == 1
    assert found["MB"] > 0
    assert found["stall, ms"] > 0
