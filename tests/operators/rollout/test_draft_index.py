"""The index of texts: matches, continuations, and bounded memory."""

from __future__ import annotations

import numpy as np
import pytest

from operators.rollout.draft_index import LONGEST, DraftIndex, Match, Text


def text(prompt: int, *tokens: int) -> Text:
    return Text(prompt, np.array(tokens, np.int32))


def drafted(index: DraftIndex, prompt: int, *tail: int, most: int = 9) -> list[int]:
    match = index.find(prompt, tail)
    return [] if match is None else index.continuation(match, most)


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ((1, 2, 3), [4, 5]),
        ((9, 2, 3, 4), [5]),
        ((2, 3), []),  # shorter than an n-gram
        ((3, 4, 5), []),  # the text ends
        ((7, 7, 7), []),
    ],
)
def test_draft_continues_the_text_after_the_same_tokens(tail: tuple[int, ...], expected: list[int]) -> None:
    index = DraftIndex(64)
    index.add([text(1, 1, 2, 3, 4, 5)])
    assert drafted(index, 1, *tail) == expected


def test_draft_has_at_most_the_requested_tokens() -> None:
    index = DraftIndex(64)
    index.add([text(1, *range(20))])
    assert drafted(index, 1, 0, 1, 2, most=4) == [3, 4, 5, 6]


def test_longest_match_wins_then_the_same_prompt_then_the_newest() -> None:
    index = DraftIndex(256)
    index.add([text(1, 4, 1, 2, 3, 10), text(2, 5, 1, 2, 3, 20), text(1, 6, 1, 2, 3, 30)])
    assert drafted(index, 9, 5, 1, 2, 3) == [20]
    assert drafted(index, 2, 7, 1, 2, 3) == [20]
    assert drafted(index, 9, 7, 1, 2, 3) == [30]
    index.add([text(3, 40, 41, 42, 43, 44, 45, 46, 50), text(4, 44, 45, 46, 60)])
    assert drafted(index, 4, 40, 41, 42, 43, 44, 45, 46) == [60]  # 3 tokens and the prompt count as 7
    assert drafted(index, 4, 39, 40, 41, 42, 43, 44, 45, 46) == [60]
    assert drafted(index, 5, 40, 41, 42, 43, 44, 45, 46) == [50]


def test_n_grams_do_not_span_texts() -> None:
    index = DraftIndex(64)
    index.add([text(1, 1, 2), text(1, 3, 4, 5)])
    assert drafted(index, 1, 1, 2, 3) == drafted(index, 1, 2, 3, 4) == []


def test_follow_moves_a_match_with_the_tokens_gained() -> None:
    index = DraftIndex(64)
    index.add([text(1, *range(10))])
    match = index.find(1, [0, 1, 2])
    assert match == Match(2, 3, same_prompt=True)
    assert index.follow(match, [3, 4]) == Match(4, 5, same_prompt=True)
    assert index.follow(match, [3, 9]) is None
    assert index.follow(match, list(range(3, 10))) is None  # nothing follows


def test_index_forgets_the_oldest_texts() -> None:
    index, drawn = DraftIndex(256), np.random.default_rng(0)
    texts = [drawn.integers(0, 1000, 40) for _ in range(60)]
    for number, tokens in enumerate(texts):
        index.add([Text(number, tokens)])
    found = [drafted(index, number, *tokens[:8].tolist(), most=40) for number, tokens in enumerate(texts)]
    assert [bool(each) for each in found] == [False] * 55 + [True] * 5
    for each, tokens in zip(found[55:], texts[55:], strict=True):
        assert each == tokens[8:].tolist()


def test_text_longer_than_the_index_keeps_its_end() -> None:
    index = DraftIndex(64)
    index.add([text(1, *range(1000))])
    assert drafted(index, 1, 990, 991, 992, most=3) == [993, 994, 995]
    assert drafted(index, 1, 900, 901, 902) == []


def test_find_equals_a_search_of_all_texts() -> None:
    """Few tokens, so that n-grams repeat: the draft follows an occurrence at least as long as any other compared."""
    drawn = np.random.default_rng(1)
    texts = [drawn.integers(0, 6, 30).tolist() for _ in range(4)]
    index = DraftIndex(1024)
    index.add([Text(0, np.array(tokens, np.int32)) for tokens in texts])
    for _ in range(300):
        tail = drawn.integers(0, 6, 12).tolist()
        match = index.find(0, tail)
        common = [_common(tail, tokens[:end]) for tokens in texts for end in range(1, len(tokens))]
        if max(common) < 3:
            assert match is None
        else:
            assert match is not None
            assert 3 <= match.tokens <= max(common) <= LONGEST


def _common(tail: list[int], before: list[int]) -> int:
    count = 0
    while count < min(len(tail), len(before)) and tail[-1 - count] == before[-1 - count]:
        count += 1
    return count
