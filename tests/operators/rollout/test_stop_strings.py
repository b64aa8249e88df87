"""Stop strings in the text of tokens; engines with stop strings are in test_engine_stops.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from record_factories import version
from scripted_engine import ScriptedEngine
from tiny_engines import request

from operators.rollout import stop_strings
from operators.rollout.engine import Completion
from operators.rollout.stop_strings import StopMatcher, StoppingEngine


def decode(token_ids: list[int]) -> str:
    return bytes(token_ids).decode(errors="replace")


@pytest.mark.parametrize(
    ("strings", "text", "end"),
    [
        ((), "abc", None),
        (("</c>",), "<c>1</c", None),
        (("</c>",), "<c>1</c>", 8),
        (("</c>",), "</c></c>", 4),
        (("x", "b"), "abx", 2),
        (("é",), "caé!", 4),
    ],
)
def test_stop_matcher_finds_the_completing_token(strings: tuple[str, ...], text: str, end: int | None) -> None:
    stops, token_ids = StopMatcher(strings, decode), np.frombuffer(text.encode(), np.uint8)
    assert stops.end(token_ids) == end
    if end is not None:
        assert stops.may_complete(token_ids[end - 1 : end])
        assert not stops.may_complete(token_ids[:1]) or end == 1


class ManyAtOnce(ScriptedEngine):
    """Generates three tokens per step; its KV covers all of them."""

    def step(self) -> Sequence[Completion]:
        return [done for _ in range(3) for done in ScriptedEngine.step(self)]


def test_kv_is_cut_at_a_stop_string() -> None:
    inner = ManyAtOnce(steps=lambda name: 9, token=lambda number, position: ord("a") + position)
    it = StoppingEngine(inner, decode)
    it.load(Path(), version(1))
    asked = request(0, prompt=0)
    it.submit(replace(asked, sampling=replace(asked.sampling, stop_strings=("d",)), keep_kv=True))
    assert list(it.step()) == []
    (done,) = it.step()
    assert decode(done.generated.token_ids.tolist()) == "abcd"
    assert done.generated.kv is not None
    assert (done.generated.kv.tokens, done.generated.kv.layout_tokens) == (4, 6)
    assert it.release(["p0.0"]) == {}


def test_matchers_of_the_last_requests_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the tokens that it has seen; agents choose the strings of a request."""
    monkeypatch.setattr(stop_strings, "MAX_MATCHERS", 2)
    it = StoppingEngine(ScriptedEngine(), decode)
    for number, string in enumerate("abac"):
        asked = request(number, prompt=0)
        it.submit(replace(asked, sampling=replace(asked.sampling, stop_strings=(string,))))
    assert list(it._matchers) == [("a",), ("c",)]
    first, _, third, _ = it._watched.values()
    assert first.matcher is third.matcher
