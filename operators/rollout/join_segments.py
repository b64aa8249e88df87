"""The conversations of an agent's episode as one prompt and one response: pure functions of positions.

The response of the trajectory has the tokens of all conversations, one after another; the context restarts at each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from schemas.records import Conversation, Segment, TokenRange


class JoinedSegments(NamedTuple):
    """Positions among the tokens of the episode, int64, and which of the response are trained, bool.

    `missing`: a segment has positions beyond the tokens, so nothing is joined.
    """

    prompt: np.ndarray
    response: np.ndarray
    trained: np.ndarray
    conversations: tuple[Conversation, ...]
    missing: bool = False


def join_segments(segments: Sequence[Segment], messages: str, drawn: np.ndarray, *, whole: bool) -> JoinedSegments:
    """Join `segments` of an episode of which the model has drawn the tokens `drawn`, bool[t].

    `messages` is a JSON list with those of each. The prompt is that of the first. A token in several is trained
    in the first of them, if `whole` in each.
    """
    nothing = JoinedSegments(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, bool), ())
    if any(each.stop > len(drawn) for segment in segments for each in segment.ranges):
        return nothing._replace(missing=True)
    prompt, parts, masks = nothing.prompt, [nothing.response], [nothing.trained]
    conversations: list[Conversation] = []
    untrained = drawn.copy()
    length = 0
    said = _texts(messages)
    for segment, text in zip(segments, said + [""] * (len(segments) - len(said)), strict=False):
        positions = positions_in(segment.ranges)
        trained = (drawn if whole else untrained)[positions]
        untrained[positions] = False
        start, prompt_tokens = length, segment.prompt_tokens
        if conversations and not trained.any():
            continue
        if not conversations:
            prompt, positions = np.split(positions, [prompt_tokens])
            trained = trained[prompt_tokens:]
        trained[: 0 if not conversations else 1] = False  # nothing predicts the first token of a context
        conversations.append(Conversation(start, prompt_tokens, text))
        parts.append(positions)
        masks.append(trained)
        length += len(positions)
    return JoinedSegments(prompt, np.concatenate(parts), np.concatenate(masks), tuple(conversations))


def _texts(messages: str) -> list[str]:
    """Each element of the JSON list `messages` as JSON; "" for null."""
    try:
        found = json.loads(messages)
    except ValueError:
        return []
    return ["" if each is None else json.dumps(each, ensure_ascii=False) for each in found or ()]


def positions_in(ranges: Sequence[TokenRange]) -> np.ndarray:
    """The positions in `ranges`, int64[n], in their order."""
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(each.start, each.stop) for each in ranges)])
