"""Lengths of emulated responses: the lognormal distribution, and files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from operators.rollout.emulation_config import LengthsConfig
from operators.rollout.response_lengths import open_lengths


def test_length_depends_only_on_seed_and_trajectory() -> None:
    lengths, again = open_lengths(LengthsConfig()), open_lengths(LengthsConfig())
    assert lengths(0, "p1.0") == again(0, "p1.0")
    assert len({lengths(seed, f"p{number}.0") for seed in (0, 1) for number in range(50)}) > 90


def test_lognormal_lengths_match_median_and_p99() -> None:
    lengths = open_lengths(LengthsConfig(p50=2000, p99=16000))
    drawn = np.array([lengths(7, f"p{number}.{member}") for number in range(2500) for member in range(8)])
    assert np.median(drawn) == pytest.approx(2000, rel=0.03)
    assert np.quantile(drawn, 0.99) == pytest.approx(16000, rel=0.1)
    assert drawn.min() >= 1


def test_equal_median_and_p99_give_constant_lengths() -> None:
    lengths = open_lengths(LengthsConfig(p50=300, p99=300))
    assert {lengths(0, f"p{number}.0") for number in range(100)} == {300}


def test_lengths_file_serves_named_and_other_trajectories(tmp_path: Path) -> None:
    (tmp_path / "l.jsonl").write_text('{"trajectory_id": "p0.1", "length": 77}\n\n{"length": 5}\n')
    pq.write_table(pa.table({"trajectory_id": ["p0.1", None], "length": [77, 5]}), tmp_path / "l.parquet")
    for name in ("l.jsonl", "l.parquet"):
        lengths = open_lengths(LengthsConfig(file=str(tmp_path / name)))
        assert lengths(0, "p0.1") == lengths(1, "p0.1") == 77
        drawn = [lengths(0, f"p{number}.0") for number in range(400)]
        assert set(drawn) == {5, 77}
        assert 120 < drawn.count(5) < 280


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "has no lengths"),
        ('{"length": 5}\n{"len": 5}\n', ":2: length must be an integer"),
        ('{"length": 0}\n', "not 0"),
        ('{"length": true}\n', "not True"),
        ("[5]\n", ":1: length must be"),
        ("{\n", "cannot read the lengths"),
    ],
)
def test_lengths_file_without_lengths_is_rejected(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "l.jsonl").write_text(content)
    with pytest.raises(ValueError, match=says) as caught:
        open_lengths(LengthsConfig(file=str(tmp_path / "l.jsonl")))
    assert "l.jsonl" in str(caught.value)


def test_missing_or_invalid_lengths_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "l.parquet").write_text("not")
    for name in ("l.parquet", "none.jsonl"):
        with pytest.raises(ValueError, match=f"cannot read the lengths in .*{name}"):
            open_lengths(LengthsConfig(file=str(tmp_path / name)))
