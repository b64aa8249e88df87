"""The contract of every engine for stop strings, within a StoppingEngine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_kinds import KINDS, REPEATING, MakeEngine, assert_equal, maker, stopping
from tiny_engines import request, run

from operators.rollout.engine import Completion, Engine, PartialResponse, Request
from operators.rollout.stop_strings import StoppingEngine

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmn"
"""The character of each token."""


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> MakeEngine:
    return maker(request.param)


def letters(token_ids: list[int]) -> str:
    return "".join(LETTERS[token] for token in token_ids)


def with_strings(make: MakeEngine, **options: Any) -> Engine:
    return StoppingEngine(make(**options), letters)


def first_end(text: str, strings: tuple[str, ...]) -> int | None:
    ends = [text.index(string) + len(string) for string in strings if string in text]
    return min(ends, default=None)


def asked_to_stop(make: MakeEngine) -> tuple[list[Request], dict[str, Completion]]:
    """Requests with stop strings that occur in some of their responses, and the expected completions."""
    asked = [replace(one, sampling=replace(one.sampling, max_new_tokens=30)) for one in stopping(8)]
    free = run(make(slots=8), asked)
    texts = {name: letters(completion.generated.token_ids.tolist()) for name, completion in free.items()}
    strings = tuple(text[at : at + 2] for at, text in enumerate(list(texts.values())[::3], start=4) if len(text) > at)
    expected = {}
    for name, completion in free.items():
        end = first_end(texts[name], strings)
        expected[name] = completion
        if end is not None:
            partial = PartialResponse(completion.generated.token_ids[:end], completion.generated.logprobs[:end])
            expected[name] = replace(completion, generated=partial, finish_reason="stop")
    assert 0 < sum(len(expected[name].generated.token_ids) < len(texts[name]) for name in texts) < len(texts)
    return [replace(one, sampling=replace(one.sampling, stop_strings=strings)) for one in asked], expected


def test_stop_string_ends_with_the_completing_token(make: MakeEngine) -> None:
    asked, expected = asked_to_stop(make)
    for slots in (8, 3):
        done = run(with_strings(make, slots=slots), asked)
        assert done.keys() == expected.keys()
        for name, completion in done.items():
            assert_equal(completion, expected[name])


@pytest.mark.parametrize("steps", [1, 4, 9])
@pytest.mark.parametrize("kind", REPEATING)
def test_stop_string_is_found_across_a_resumption(kind: str, steps: int) -> None:
    make = maker(kind)
    asked, expected = asked_to_stop(make)
    source = with_strings(make, slots=8)
    for one in asked:
        source.submit(one)
    done = {completion.trajectory_id: completion for _ in range(steps) for completion in source.step()}
    released = source.release([one.trajectory_id for one in asked])
    assert source.status().running == source.status().waiting == source.status().kv_used == 0
    left = [replace(one, partial=released[one.trajectory_id]) for one in asked if one.trajectory_id in released]
    done |= run(with_strings(make, slots=3), left)
    for name, completion in done.items():
        assert_equal(completion, expected[name])


def test_partial_with_a_stop_string_completes_unchanged(make: MakeEngine) -> None:
    one = request(0)
    one = replace(one, sampling=replace(one.sampling, stop_strings=("BC",)))
    it = with_strings(make)
    partial = PartialResponse(np.array([0, 1, 2, 3], np.int32), np.full(4, -0.5, np.float32))
    it.submit(replace(one, partial=partial))
    with pytest.raises(ValueError, match="is already in the engine"):
        it.submit(one)
    assert (it.due(), it.status().waiting) == (0.0, 1)
    (done,) = it.step()
    assert (done.generated.token_ids.tolist(), done.finish_reason) == ([0, 1, 2], "stop")
    assert it.due() == math.inf
    assert list(it.step()) == []
