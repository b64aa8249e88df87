"""The benchmark of router replay: choices are those of a router, and no encoding is below their entropy."""

from __future__ import annotations

import numpy as np

from benchmarks.router_replay import CHOSEN, EXPERTS, LAYERS, choices, measure, stored_bytes


def test_choices_are_different_experts_in_rising_order() -> None:
    chosen = choices(16, 0.0)
    assert chosen.shape == (16, LAYERS, CHOSEN)
    assert (np.diff(chosen.astype(int)) > 0).all()
    assert chosen.max() < EXPERTS


def test_skewed_choices_take_fewer_bytes() -> None:
    even, skewed = measure(512, 0.0), measure(512, 3.0)
    assert even["plain"] == LAYERS * CHOSEN
    assert even["even choices, at least"] < even["zstd"] <= even["plain"]
    assert skewed["zstd"] < even["zstd"]


def test_log_of_a_broker_has_the_compressed_records() -> None:
    (stored,) = stored_bytes([choices(256, 3.0)], 128)
    compressed, plain = (256 * measure(256, 3.0)[name] for name in ("zstd", "plain"))
    assert 0.8 * compressed < stored < plain  # Kafka has another level of zstd
