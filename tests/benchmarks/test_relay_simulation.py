"""benchmarks/relay_simulation.py: the simulated times match the closed forms of the schedules."""

from __future__ import annotations

import math

import pytest

from benchmarks.relay_simulation import formula, simulate
from infra.transport.schedules import SCHEDULES, k_way


@pytest.mark.parametrize(
    ("schedule", "nodes", "steps"),
    [("chain", 8, 5 + 6), ("chain", 2, 5), ("binomial", 8, 5 + 2), ("binomial", 64, 5 + 5), ("tree", 8, 5 * 3)],
)
def test_simulate_takes_the_steps_of_the_schedule(schedule: str, nodes: int, steps: int) -> None:
    assert simulate(SCHEDULES[schedule](nodes, 5), 1, nodes, 5, 0.5).everywhere == steps * 0.5


def test_simulate_k_way_completes_a_first_copy_early() -> None:
    arrived = simulate(k_way("binomial", 4, 16, 8), 4, 16, 8, 1.0)
    assert arrived.first_copy == 2.0
    assert arrived.everywhere == 8 + 1


def test_simulate_gives_a_node_of_two_corners_one_link() -> None:
    assert simulate(SCHEDULES["binomial"](3, 4), 1, 3, 4, 1.0).everywhere >= 4 + 1


def test_formula_matches_a_chain_with_the_best_chunk_count() -> None:
    relays, all_s, startup = 10, 1.0, 0.02
    chunks = round(math.sqrt((relays - 2) * all_s / startup))
    arrived = simulate(SCHEDULES["chain"](relays, chunks), 1, relays, chunks, all_s / chunks + startup)
    assert arrived.everywhere == pytest.approx(formula(relays, all_s, startup), rel=1e-6)
