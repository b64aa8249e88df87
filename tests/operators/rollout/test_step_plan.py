from __future__ import annotations

import numpy as np
import pytest

from operators.rollout.attention_chunks import RowOrder, split_rows
from operators.rollout.step_plan import plan_prefill


def context(*tokens: int) -> np.ndarray:
    return np.array(tokens)


def test_plan_prefill_stores_every_token_once() -> None:
    generator = np.random.default_rng(0)
    distinct = [generator.integers(1, 50, length) for length in (3, 9, 1, 9, 5)]
    contexts = [distinct[i] for i in (0, 1, 2, 3, 4, 1, 0)]
    rows = [4, 0, 9, 2, 7, 1, 3]
    written: dict[tuple[int, int], int] = {}
    for block in plan_prefill(contexts, rows, max_tokens=20):
        assert block.token_ids.size <= 20
        for source, row, position in zip(block.source, block.row, block.position, strict=True):
            assert (row, position) not in written
            assert source % block.token_ids.shape[1] == position
            written[row, position] = block.token_ids.reshape(-1)[source]
    expected = {(row, i): token for row, tokens in zip(rows, contexts, strict=True) for i, token in enumerate(tokens)}
    assert written == expected


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "shapes"),
    [
        ([4, 4, 4], 100, [(3, 4)]),
        ([4, 4, 4], 8, [(2, 4), (1, 4)]),
        ([9, 4], 100, [(1, 9), (1, 4)]),  # more than half of the shorter would be padding
        ([9, 5, 4], 100, [(2, 9), (1, 4)]),
        ([30], 8, [(1, 30)]),
        ([], 8, []),
    ],
)
def test_plan_prefill_bounds_tokens_and_padding(
    lengths: list[int], max_tokens: int, shapes: list[tuple[int, int]]
) -> None:
    contexts = [np.arange(length) + 100 * i for i, length in enumerate(lengths)]
    blocks = plan_prefill(contexts, range(len(lengths)), max_tokens)
    assert [block.token_ids.shape for block in blocks] == shapes


def test_plan_prefill_computes_a_shared_prompt_once() -> None:
    (block,) = plan_prefill([context(1, 2)] * 8 + [context(3, 4)], range(9), 100)
    assert block.token_ids.tolist() == [[1, 2], [3, 4]]
    assert len(block.row) == 18


@pytest.mark.parametrize(
    ("lengths", "chunks"),
    [
        ([5], [(0, 1, 5, True)]),
        ([7] * 128, [(0, 128, 7, True)]),
        ([8, 7], [(0, 2, 8, False)]),  # a second chunk costs more than it saves
        ([200] * 64 + [20] * 64, [(0, 64, 200, True), (64, 128, 20, True)]),
        ([20] * 64 + [200] * 64, [(0, 64, 20, True), (64, 128, 200, True)]),
        ([200] * 64 + [100] * 63 + [101], [(0, 64, 200, True), (64, 128, 101, False)]),
    ],
)
def test_split_rows_splits_where_it_saves(lengths: list[int], chunks: list[tuple[int, int, int, bool]]) -> None:
    got = split_rows(np.array(lengths), query_size=128)
    assert [(chunk.start, chunk.stop, chunk.width, chunk.uniform) for chunk in got] == chunks


def test_split_rows_covers_all_rows_in_few_chunks() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 256)
    for most in (1, 2, 4):
        chunks = split_rows(lengths, 1024, most)
        assert len(chunks) <= most
        assert [chunk.start for chunk in chunks] == [0, *(chunk.stop for chunk in chunks[:-1])]
        assert chunks[-1].stop == 256
        assert all(lengths[chunk.start : chunk.stop].max() == chunk.width for chunk in chunks)
    ordered = split_rows(np.sort(lengths), 1024, 4)
    cost = sum((chunk.stop - chunk.start) * chunk.width for chunk in ordered)
    assert cost < 1.3 * lengths.sum()  # four steps under a straight line: at best 1.25


def test_row_order_is_due_after_enough_padding() -> None:
    order = RowOrder()
    lengths = np.tile([10, 100], 32)
    chunks = split_rows(lengths, 128)
    asked = [order.order_if_due(lengths, chunks) for _ in range(9)]
    due = [step for step, wanted in enumerate(asked) if wanted is not None]
    assert due == [7]  # 45 of 100 attended tokens are padding: after 8 steps 6 × the 55 that are not are exceeded
    wanted = asked[7]
    assert wanted is not None
    assert lengths[wanted].tolist() == sorted(lengths.tolist(), reverse=True)
    assert wanted[:32].tolist() == list(range(1, 64, 2))


def test_row_order_keeps_sorted_rows() -> None:
    order = RowOrder()
    lengths = np.arange(100, 0, -1)
    chunks = split_rows(lengths, 1, most=1)
    assert all(order.order_if_due(lengths, chunks) is None for _ in range(50))
