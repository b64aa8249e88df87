"""Transfer schedules: each node gets each block once, sends only blocks that it has, and step counts are exact."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from infra.transport.schedules import SCHEDULES, Pull, TransferStep, k_way, pulls, pulls_of


def execute(steps: Iterator[TransferStep], sources: int, nodes: int, blocks: int) -> tuple[int, list[np.ndarray]]:
    """Execute and check `steps`; return their number, and the blocks of each node after each, bool[nodes, blocks]."""
    has = np.zeros((nodes, blocks), bool)
    has[:sources] = True
    after = []
    for step in steps:
        assert has[step.sources, step.blocks].all(), "a node sends a block that it does not have"
        assert not has[step.receivers, step.blocks].any(), "a node receives a block that it has"
        assert len({*zip(step.receivers.tolist(), step.blocks.tolist(), strict=True)}) == len(step.blocks)
        has = has.copy()
        has[step.receivers, step.blocks] = True
        after.append(has)
    assert has.all(), "a node lacks a block"
    return len(after), after


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("blocks", [1, 2, 5, 16])
@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 7, 8, 12, 16, 17])
def test_schedule_delivers_every_block_to_every_node_once(schedule: str, nodes: int, blocks: int) -> None:
    execute(SCHEDULES[schedule](nodes, blocks), 1, nodes, blocks)


@pytest.mark.parametrize(
    ("schedule", "nodes", "blocks", "steps"),
    [
        ("chain", 8, 4, 10),
        ("chain", 2, 1, 1),
        ("tree", 8, 4, 12),
        ("tree", 5, 2, 6),
        ("binomial", 8, 4, 6),
        ("binomial", 64, 10, 15),
        ("binomial", 2, 3, 3),
    ],
)
def test_schedule_step_count_matches_the_formula(schedule: str, nodes: int, blocks: int, steps: int) -> None:
    assert execute(SCHEDULES[schedule](nodes, blocks), 1, nodes, blocks)[0] == steps


@pytest.mark.parametrize("schedule", ["chain", "binomial"])
def test_step_has_one_send_and_one_receive_per_node(schedule: str) -> None:
    for step in SCHEDULES[schedule](16, 6):
        assert len(set(step.sources.tolist())) == len(set(step.receivers.tolist())) == len(step.blocks)


@pytest.mark.parametrize(("sources", "nodes", "blocks"), [(2, 10, 8), (4, 12, 16), (1, 9, 4), (3, 4, 9), (4, 6, 8)])
def test_k_way_completes_a_copy_across_receivers_early(sources: int, nodes: int, blocks: int) -> None:
    count, after = execute(k_way("binomial", sources, nodes, blocks), sources, nodes, blocks)
    first = next(number for number, has in enumerate(after, 1) if has[sources:].any(axis=0).all())
    assert first == -(-blocks // sources)  # one source alone would take `blocks` steps
    assert count >= first


def test_k_way_stripes_a_single_receiver_over_all_sources() -> None:
    wanted = pulls_of("binomial", [10, 11, 12, 13], [20], 20, 8)
    assert wanted[:4] == [Pull(0, 10, 0), Pull(1, 11, 0), Pull(2, 12, 0), Pull(3, 13, 0)]
    assert sorted(pull.block for pull in wanted) == list(range(8))


def test_pulls_of_chain_equals_its_general_form() -> None:
    long = [Pull(block, [7, 8, 9][source], step) for block, source, step in pulls(k_way("chain", 1, 3, 5), 2)]
    assert pulls_of("chain", [7], [8, 9], 9, 5) == long


def test_pulls_of_raises_for_invalid_arguments() -> None:
    with pytest.raises(ValueError, match="unknown schedule 'ring', it must be one of chain, tree, binomial"):
        pulls_of("ring", [0], [1], 1, 1)
    with pytest.raises(ValueError, match="node 0 is a source"):
        pulls_of("chain", [0], [1], 0, 1)
