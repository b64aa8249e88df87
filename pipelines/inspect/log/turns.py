"""The turns of an agent's episode as a tree, from the records of its history."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from operators.gateway.turn_tree import CompleteTurn, EpisodeTimes, Ranges, leaf_turns, length_of, times_of
from schemas.records import Assignment, EpisodeEnd, Experience, Trajectory, TurnEnded, TurnRequest


@dataclass(frozen=True)
class TurnNode:
    """Turn `number`, counted from 1, which continues turn `after`; None: it begins a conversation.

    `depth` is how many branches lead to it. `start_s` and `seconds` are its begin, after the episode's assignment, and
    its duration. `messages` are those that its new tokens encode; `response` is None if its conversation is not in the
    trajectory.
    """

    number: int
    after: int | None
    depth: int
    start_s: float
    seconds: float | None
    context_tokens: int
    new_tokens: int
    response_tokens: int
    finish_reason: str | None
    error: str | None
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    response: Mapping[str, Any] | None = None
    trained: bool = False
    """Whether its response is in a conversation that is trained."""
    reward: float | None = None
    """That of the conversation that ends with it, if conversations have rewards of their own."""


@dataclass(frozen=True)
class EpisodeTurns:
    """The turns of an episode in their order, and where its time went."""

    turns: list[TurnNode]
    times: EpisodeTimes


def turns_of(records: Iterable[Any]) -> EpisodeTurns | None:
    """The turns in `records`, the history of a trajectory; None if no agent made a request."""
    requests: dict[str, TurnRequest] = {}
    ended: dict[str, TurnEnded] = {}
    assigned, stopped, finished, end, scored = 0, 0, None, None, None
    for record in records:
        match record:
            case Assignment():
                assigned = assigned or record.assigned_at
            case TurnRequest():
                requests.setdefault(record.turn_id, record)
            case TurnEnded():
                ended.setdefault(record.turn_id, record)
                stopped = max(stopped, record.written_at)
            case EpisodeEnd():
                stopped, end = record.written_at, record
            case Trajectory():
                finished = record
            case Experience():
                scored = record
    if not requests:
        return None
    ordered = sorted(requests.values(), key=lambda request: (request.start, request.written_at))
    complete = [CompleteTurn(turn, ended[turn.turn_id]) for turn in ordered if turn.turn_id in ended]
    nodes = _nodes(ordered, ended, assigned, _responses(complete, finished), _rewards(end, scored))
    times = times_of(assigned, [(turn.request.written_at, turn.ended.written_at) for turn in complete], stopped)
    return EpisodeTurns(nodes, times)


def turns_to_plain(found: EpisodeTurns) -> dict[str, Any]:
    """The turns, JSON-ready."""
    times = {f"{name}_s": value for name, value in found.times._asdict().items()}
    return {**times, "turns": [asdict(node) for node in found.turns]}


def _nodes(
    requests: list[TurnRequest],
    ended: Mapping[str, TurnEnded],
    assigned: int,
    responses: Mapping[str, Mapping[str, Any]],
    rewards: Mapping[Ranges, float],
) -> list[TurnNode]:
    nodes: list[TurnNode] = []
    after_of: dict[Ranges, int | None] = {(): None}
    """By recorded tokens: the number of the turn that they end with."""
    children: set[int | None] = set()
    for number, request in enumerate(requests, 1):
        end = ended.get(request.turn_id)
        after = after_of.get(request.context)
        depth = (0 if after is None else nodes[after - 1].depth) + (after is not None and after in children)
        children.add(after)
        turn = None if end is None else CompleteTurn(request, end)
        if turn is not None:
            after_of.setdefault(turn.asked, after)
            after_of[turn.whole] = number
        nodes.append(
            TurnNode(
                number=number,
                after=after,
                depth=depth,
                start_s=(request.written_at - assigned) / 1000,
                seconds=None if end is None else (end.written_at - request.written_at) / 1000,
                context_tokens=length_of(request.context),
                new_tokens=len(request.token_ids),
                response_tokens=0 if turn is None else turn.ended.stop - turn.given,
                finish_reason=None if end is None else end.finish_reason,
                error=None if end is None else end.error,
                messages=_messages(request.messages),
                response=responses.get(request.turn_id),
                trained=request.turn_id in responses,
                reward=None if turn is None else rewards.get(turn.whole),
            )
        )
    return nodes


def _rewards(end: EpisodeEnd | None, scored: Experience | None) -> dict[Ranges, float]:
    """The rewards of conversations by their tokens; none if they have none of their own."""
    if end is None or scored is None or len(end.segments) != len(scored.conversation_rewards):
        return {}
    return {each.ranges: reward for each, reward in zip(end.segments, scored.conversation_rewards, strict=True)}


def _responses(turns: list[CompleteTurn], finished: Trajectory | None) -> dict[str, Mapping[str, Any]]:
    """The responses by turn, read from the messages of the conversations that are trained."""
    found: dict[str, Mapping[str, Any]] = {}
    by_whole = {turn.whole: turn for turn in turns}
    conversations = (
        {} if finished is None else {each.messages: _messages(each.messages) for each in finished.conversations}
    )
    for leaf in leaf_turns(turns):
        chain = [leaf]
        while (parent := by_whole.get(chain[0].request.context)) is not None and parent not in chain:
            chain.insert(0, parent)
        for messages in conversations.values():
            found |= _along(chain, messages)
    return found


def _along(chain: list[CompleteTurn], messages: list[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The responses of `chain` in `messages`; nothing if these are not its messages."""
    at, found = 0, {}
    for turn in chain:
        own = _messages(turn.request.messages)
        if not own or messages[at : at + len(own)] != own or len(messages) <= at + len(own):
            return {}
        at += len(own) + 1
        found[turn.request.turn_id] = messages[at - 1]
    return found if at == len(messages) else {}


def _messages(text: str) -> list[Mapping[str, Any]]:
    try:
        found = json.loads(text or "[]")
    except ValueError:
        return []
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
