"""The conversations of an episode as one response: contexts, masks, and tokens in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from operators.rollout.agent_episodes import join_segments
from schemas.records import Conversation, Segment, TokenRange

DRAWN = np.array([0, 0, 1, 1, 1, 0, 1, 1, 0, 1], bool)
LEFT = Segment(2, (TokenRange(0, 8),))
MESSAGES = '[[{"role": "user"}]]'
SAID = '[{"role": "user"}]'
RIGHT = Segment(2, (TokenRange(0, 5), TokenRange(8, 10)))


def joined(*segments: Segment, whole: bool) -> Any:
    return join_segments(segments, MESSAGES, DRAWN, whole=whole)


def test_one_segment_is_prompt_and_response() -> None:
    found = joined(LEFT, whole=False)
    assert (found.prompt.tolist(), found.response.tolist()) == ([0, 1], [2, 3, 4, 5, 6, 7])
    assert found.trained.tolist() == [True, True, True, False, True, True]
    assert found.conversations == (Conversation(0, 2, SAID),)


@pytest.mark.parametrize(("whole", "shared"), [(False, False), (True, True)])
def test_common_tokens_are_trained_once_or_in_each(whole: bool, shared: bool) -> None:
    found = joined(LEFT, RIGHT, whole=whole)
    assert found.response.tolist() == [2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 8, 9]
    assert found.trained.tolist() == [*DRAWN[2:8], False, False, *[shared] * 3, False, True]
    assert found.conversations == (Conversation(0, 2, SAID), Conversation(6, 2, ""))


def test_a_context_does_not_begin_with_a_trained_token() -> None:
    found = joined(LEFT, Segment(0, (TokenRange(9, 10), TokenRange(2, 4))), whole=True)
    assert found.trained[6:].tolist() == [False, True, True]


def test_a_segment_without_trained_tokens_is_left_out() -> None:
    assert joined(LEFT, Segment(2, (TokenRange(0, 5),)), whole=False).conversations == (Conversation(0, 2, SAID),)


def test_segments_beyond_the_tokens_are_missing() -> None:
    found = joined(LEFT, Segment(1, (TokenRange(8, 11),)), whole=False)
    assert found.missing
    assert not len(found.prompt)


@pytest.mark.parametrize("messages", ["[null]", "[]", "{", "null"])
def test_missing_messages_are_empty(messages: str) -> None:
    assert join_segments([LEFT], messages, DRAWN, whole=False).conversations == (Conversation(0, 2, ""),)
