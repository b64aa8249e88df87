"""benchmarks/spot_prices.py: an autoscaled run in virtual time follows a trace of prices, and loses nothing."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.spot_prices import EXAMPLE, measure
from operators.autoscaler.prices import parse_prices

DEAR = 4.0
DEAR_S, CHEAP_S = 60, 420
"""Seconds from which all replicas cost more than the limit, and less again."""


def test_replicas_follow_a_trace_of_prices(tmp_path: Path) -> None:
    file = tmp_path / "prices.csv"
    file.write_text(f"seconds,price\n0,1.0\n{DEAR_S},{DEAR:.1f}\n{CHEAP_S},1.0\n")
    trace = parse_prices(file.read_text(), str(file))
    options = Namespace(seed=0, replicas=2, limit=1.5, trace=file, notice=60.0, minutes=10)
    all_replicas, priced = (measure(name, EXAMPLE, trace, options) for name in ("all", "price"))
    assert all_replicas.decisions == ()
    (fewer_at, fewer, _), (more_at, more, _) = priced.decisions
    assert (fewer, more) == (1, 2)
    assert DEAR_S <= fewer_at < DEAR_S + 120
    assert CHEAP_S <= more_at < CHEAP_S + 120
    assert priced.lost == 0  # each leaves with notice
    assert all_replicas.cost / all_replicas.replica_hours == pytest.approx((240 + 360 * DEAR) / 600, rel=0.05)
    assert priced.replica_hours < all_replicas.replica_hours
    assert priced.tokens < all_replicas.tokens
    assert priced.cost_per_million < all_replicas.cost_per_million
