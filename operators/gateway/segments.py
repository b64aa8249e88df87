"""Which conversations of an episode are trained: pure functions of its turns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from infra.models.conversations import ChatMessage
from operators.gateway.reports import NO_REPORT, AgentReport
from operators.gateway.turn_tree import CompleteTurn, Ranges, leaf_turns, length_of
from schemas.records import MAX_MESSAGES_CHARACTERS, Branches, Segment, TurnRequest

MAX_SEGMENTS = 64
"""Conversations of an episode that are trained: the newest ones."""

ReadResponse = Callable[[TurnRequest, Sequence[int]], ChatMessage]
"""The message of a response: a function of the turn and of its tokens."""


class Selected(NamedTuple):
    """The segments to train, and a JSON list with the messages of each, null for those that are too long.

    `rewards` are the agent's own report of each, None without one.
    """

    segments: tuple[Segment, ...]
    messages: str
    rewards: tuple[float, ...] | None = None


def segments_of(
    turns: Sequence[CompleteTurn],
    tokens: np.ndarray,
    drawn: np.ndarray,
    read_response: ReadResponse,
    branches: Branches,
    most_tokens: int,
    report: AgentReport = NO_REPORT,
) -> Selected:
    """The conversations to train, the newest first, with at most `most_tokens` tokens together, or one.

    `turns` are in their order; tokens int32[t] and drawn bool[t] are those of the episode. A conversation has the
    reward that `report` has for the last of its turns that is in it; one without such a turn has that of the episode.
    """
    conversations = _Conversations(turns, tokens, read_response)
    found: list[Segment] = []
    rewards: list[float | None] = []
    recorded: list[str] = []
    total = characters = 0
    for leaf in leaf_turns(turns)[::-1][: 1 if branches == "last" else MAX_SEGMENTS]:
        total += length_of(leaf.whole)
        if found and total > most_tokens:
            break
        mask = np.concatenate([drawn[each.start : each.stop] for each in leaf.whole])
        text = json.dumps(conversations.messages(leaf.whole), ensure_ascii=False)
        characters += len(text)
        recorded.append(text if characters <= MAX_MESSAGES_CHARACTERS else "null")
        found.append(Segment(int(mask.argmax()) if mask.any() else len(mask), leaf.whole))
        along = (turn.request.turn_id for turn in conversations.turns(leaf.whole))
        rewards.append(next((report.rewards[each] for each in along if each in report.rewards), None))
    own = None
    if any(reward is not None for reward in rewards):
        own = tuple((report.reward or 0.0) if reward is None else reward for reward in rewards)
    return Selected(tuple(found), f"[{','.join(recorded)}]", own)


class _Conversations:
    """The messages of conversations by their tokens."""

    def __init__(self, turns: Sequence[CompleteTurn], tokens: np.ndarray, read_response: ReadResponse) -> None:
        self._tokens, self._read = tokens, read_response
        self._by_end: dict[Ranges, tuple[CompleteTurn, bool]] = {}
        """By the tokens of a conversation: the turn with which it ends, and whether with its response."""
        self._responses: dict[str, ChatMessage] = {}
        for turn in turns:
            if turn.asked != turn.request.context:
                self._by_end.setdefault(turn.asked, (turn, False))
            if turn.whole != turn.request.context:  # a turn without tokens would be its own beginning
                self._by_end[turn.whole] = turn, True

    def messages(self, conversation: Ranges) -> list[dict[str, Any]]:
        """The messages of `conversation`; of one whose beginning is not recorded, those of its end."""
        backwards: list[dict[str, Any]] = []
        for turn, responded in self._backwards(conversation):
            if responded:
                backwards.append(dict(self._response(turn)))
            backwards += reversed(json.loads(turn.request.messages))
        return backwards[::-1]

    def turns(self, conversation: Ranges) -> Iterator[CompleteTurn]:
        """Yield the turns of `conversation`, the last first."""
        return (turn for turn, responded in self._backwards(conversation) if responded)

    def _backwards(self, conversation: Ranges) -> Iterator[tuple[CompleteTurn, bool]]:
        while (end := self._by_end.get(conversation)) is not None:
            yield end
            conversation = end[0].request.context

    def _response(self, turn: CompleteTurn) -> ChatMessage:
        name = turn.request.turn_id
        if name not in self._responses:
            self._responses[name] = self._read(turn.request, self._tokens[turn.given : turn.ended.stop].tolist())
        return self._responses[name]
