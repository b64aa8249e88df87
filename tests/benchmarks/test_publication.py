"""The benchmark of publications measures the stall of a trainer, and rates of several sources of one version."""

from __future__ import annotations

from pathlib import Path

from benchmarks.models import qwen2
from benchmarks.publication import make_model, measure, remote_rates
from benchmarks.version_sources import shares


def test_publication_is_measured_with_one_rank(tmp_path: Path) -> None:
    make_model(tmp_path / "model", qwen2(32, 64, 2, 8, 128, kv=4, context=64))
    found = measure(tmp_path, 1, "bfloat16", 1)
    assert found["ranks"] == 1
    assert found["MB"] > 0
    assert found["stall, ms"] > 0


def test_sources_have_all_chunks_between_them() -> None:
    for chunks, sources in ((8, 2), (7, 3), (1, 2)):
        found = shares(chunks, sources)
        assert len(found) == sources
        assert [chunk for share in found for chunk in share] == list(range(chunks))


def test_remote_parts_are_measured_over_both_transports(tmp_path: Path) -> None:
    found = remote_rates(tmp_path, {"ranks": 3, "MB": 1.5, "written after, ms": 10.0}, 2)
    assert found["gloo, GB/s"] == 0.1
    assert found["frames, GB/s"] > 0
