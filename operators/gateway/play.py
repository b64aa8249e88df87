"""Takes turns of episodes through the log: sends a request to the owner of the episode and waits for its end.

A request is repeated whenever the episode has a new owner. The owner ignores a request that it has already got, so a
repetition does no harm, whichever gateway sends it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

from infra.clocks import wall_ms
from infra.kafka.producer import BoundedProducer
from operators.gateway.conversation import TurnPlan
from operators.gateway.episode_table import EpisodeTable, OpenEpisode, RequestedTurn
from operators.gateway.errors import ApiError, invalid
from operators.gateway.reports import AgentReport, unknown_ids
from operators.gateway.turn_tree import length_of
from schemas.codec import encode
from schemas.columns import floats, token_ids
from schemas.records import Branches, EpisodeEnd, TurnEnded, TurnRequest
from schemas.topics import inbox_partition

_RECHECK_S = 5.0
"""A waiting request looks at its episode after so many seconds at the latest."""

_OTHERS_S = 10.0
"""A request that waits for the turn of another one sends its order after so many seconds without progress."""

SEND_AGAIN_S = 15.0
"""An order that has changed nothing for so long may be lost: it is sent again, and its owner ignores a second one."""

KNOWN_S = 5.0
"""A turn of which another gateway has answered the request is known here after so many seconds at the latest."""

Plan = Callable[[OpenEpisode], Awaitable[TurnPlan]]
"""Called without the table's lock: to encode a long text takes seconds."""
Send = Callable[[TurnRequest | EpisodeEnd], None]


@dataclass(frozen=True, slots=True)
class TurnOptions:
    """What of a request is not its messages. `turn_id` is its identity and `digest` that of its messages."""

    turn_id: str
    digest: str
    max_tokens: int
    stop_strings: tuple[str, ...]
    tools: str = "[]"
    stream: bool = False


@dataclass(frozen=True, slots=True)
class RecordedResponse:
    """The recorded response of a turn: its tokens and their logprobs."""

    token_ids: list[int]
    logprobs: list[float]
    prompt_tokens: int
    cached_tokens: int
    finish_reason: str
    rewritten: bool = False


class Changes:
    """Wakes the requests that wait for an episode; `notify` may be called from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[str, set[asyncio.Event]] = {}

    def notify(self, names: set[str]) -> None:
        """Wake the requests that wait for one of `names`."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake, names)

    def _wake(self, names: set[str]) -> None:
        for name in names & self._waiting.keys():
            for event in self._waiting[name]:
                event.set()

    @asynccontextmanager
    async def watching(self, name: str) -> AsyncIterator[asyncio.Event]:
        """An event that is set at each change of episode `name`."""
        event = asyncio.Event()
        self._waiting.setdefault(name, set()).add(event)
        try:
            yield event
        finally:
            self._waiting[name].discard(event)
            if not self._waiting[name]:
                del self._waiting[name]


@dataclass(frozen=True, slots=True)
class _Planned:
    """A plan, which holds while its episode has this lease and this number of tokens."""

    lease: int
    length: int
    plan: TurnPlan


class Player:
    """Takes turns and ends episodes, of which at most `most_tokens` tokens are trained, or the last conversation.

    `clock` is monotonic seconds, `now` Unix milliseconds.
    """

    def __init__(
        self,
        table: EpisodeTable,
        changes: Changes,
        send: Send,
        context: int,
        timeout_s: float,
        branches: Branches = "last",
        most_tokens: int = 65_536,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], int] = wall_ms,
    ) -> None:
        self._table, self._changes, self._send, self._context = table, changes, send, context
        self._branches, self._most_tokens = branches, most_tokens
        self.timeout_s, self._clock, self._now = timeout_s, clock, now
        self._planning: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By episode: only one of its requests is planned at a time, since only one is sent."""

    async def follow(self, name: str, options: TurnOptions, plan: Plan) -> AsyncGenerator[RecordedResponse]:
        """The response so far, at each change; the last one has a finish reason. Raises ApiError, also if the episode
        gets no token within the time-out.

        A repeated request gets the recorded response. Raises ValueTooLarge for one that the log cannot have.
        """
        deadline = self._clock() + self.timeout_s
        known: tuple[Any, ...] | None = None
        send_at = shown = 0.0
        reached = self._table.length(name)
        planning = self._planning.setdefault(name, asyncio.Lock())
        async with self._changes.watching(name) as changed:
            while True:
                changed.clear()
                async with planning:
                    planned = await self._plan(name, options, plan)
                    with self._table.locked():
                        response, order = self._look(name, options, planned)
                        if order is not None:
                            self._table.announce(order)
                if response is not None and response.finish_reason:
                    yield response
                    return
                length = self._table.length(name)
                grown, reached = length > reached, length
                if grown:
                    deadline = self._clock() + self.timeout_s
                if order is not None and (key := (order.turn_id, order.lease, order.start)) != known:
                    own = order.turn_id == options.turn_id  # that of another request is sent by it, unless it has gone
                    known, send_at = key, self._clock() + (0.0 if own else _OTHERS_S)
                elif grown:  # its owner has the order
                    send_at = self._clock() + SEND_AGAIN_S
                if order is not None and self._clock() >= send_at:
                    await asyncio.to_thread(self._send, order)
                    send_at = self._clock() + SEND_AGAIN_S
                elif response is not None and len(response.token_ids) > shown:
                    shown = len(response.token_ids)
                    yield response
                await self._wait(changed, deadline)

    async def end(self, name: str, report: AgentReport) -> None:
        """End the episode, and wait until its trajectory has finished. Raises ApiError and ValueTooLarge."""
        deadline = self._clock() + self.timeout_s
        known_by = self._clock() + KNOWN_S
        sent, again_at = -1, 0.0
        async with self._changes.watching(name) as changed:
            while True:
                changed.clear()
                if self._table.has_finished(name):
                    return
                episode = self._table.get(name)
                unknown = [] if episode is None else [each for each in report.rewards if each not in episode.requested]
                if unknown and self._clock() >= known_by:  # until then another gateway may have answered them
                    raise unknown_ids(unknown)
                if episode is not None and not unknown and (episode.lease != sent or self._clock() >= again_at):
                    order = await asyncio.to_thread(self._end_order, name, episode, report)
                    await asyncio.to_thread(self._send, order)
                    sent, again_at = order.lease, self._clock() + SEND_AGAIN_S
                await self._wait(changed, deadline, most_s=KNOWN_S if unknown else None)

    async def _wait(self, changed: asyncio.Event, deadline: float, most_s: float | None = None) -> None:
        left = deadline - self._clock()
        if left <= 0:
            waited = f"no response within {self.timeout_s:g} s; repeat the request to wait longer"
            raise ApiError(504, waited, "timeout")
        try:
            await asyncio.wait_for(changed.wait(), min(left, _RECHECK_S if most_s is None else most_s))
        except TimeoutError:
            return

    async def _plan(self, name: str, options: TurnOptions, plan: Plan) -> _Planned | None:
        """The plan of the request, if it is new and no other one of its episode is in progress."""
        with self._table.locked():
            episode, length = self._table.get(name), self._table.length(name)
            if episode is None or episode.pending is not None or _ended(episode, options) is not None:
                return None
            lease = episode.lease
        return _Planned(lease, length, await plan(episode))

    def _look(
        self, name: str, options: TurnOptions, planned: _Planned | None
    ) -> tuple[RecordedResponse | None, TurnRequest | None]:
        """The response to the request so far, and what to send to the owner so that it continues."""
        episode = self._table.get(name)
        if episode is None:
            if self._table.has_finished(name):
                reason = self._table.error_of(name)
                raise ApiError(409, f"episode {name} has ended{f': {reason}' if reason else ''}", code="episode_ended")
            return None, None  # it will be assigned
        if (turn := _ended(episode, options)) is not None:
            return self._response(name, turn.request, turn.ended), None
        pending = episode.pending
        if pending is None:
            if planned is None or (planned.lease, planned.length) != (episode.lease, self._table.length(name)):
                return None, None  # what has changed wakes the request
            return None, self._order(name, episode, options, planned.plan)
        mine = pending.turn_id == options.turn_id
        order = replace(pending, lease=episode.lease, replica=episode.replica, incarnation=episode.incarnation)
        return self._response(name, pending, None) if mine else None, order

    def _order(self, name: str, episode: OpenEpisode, options: TurnOptions, plan: TurnPlan) -> TurnRequest:
        start = self._table.length(name)
        length = length_of(plan.context) + len(plan.token_ids)
        if not length:  # nobody could respond, and it would block the episode
            raise invalid("the request has no tokens: its messages are empty", "messages")
        if length >= self._context:
            raise invalid(
                f"the request has {length} tokens, but the model's context is {self._context}, response included",
                "messages",
                "context_length_exceeded",
            )
        budget = episode.prompt.sampling.max_new_tokens
        if start + len(plan.token_ids) >= budget:
            raise invalid(
                f"the request needs {len(plan.token_ids)} new tokens, but of the {budget} tokens of this episode "
                f"(prompts.max_new_tokens) {budget - start} are left",
                "messages",
                "context_length_exceeded",
            )
        order = TurnRequest(
            trajectory_id=name,
            lease=episode.lease,
            replica=episode.replica,
            incarnation=episode.incarnation,
            turn_id=options.turn_id,
            digest=options.digest,
            start=start,
            context=plan.context,
            token_ids=token_ids(plan.token_ids),
            max_tokens=options.max_tokens,
            stop_strings=options.stop_strings,
            messages=json.dumps([dict(each) for each in plan.messages], ensure_ascii=False),
            tools=options.tools,
            stream=options.stream,
            written_at=self._now(),
            rewritten=plan.rewritten,
        )
        encode(order)  # before it is announced: one that is too large would block the episode
        return order

    def _response(self, name: str, request: TurnRequest, ended: TurnEnded | None) -> RecordedResponse:
        if ended is not None and ended.finish_reason == "failed":
            raise invalid(f"the request cannot run: {ended.error}")
        first = request.start + len(request.token_ids)
        cached = length_of(request.context)
        partial = self._table.tokens(name)
        tokens, logprobs = (
            (token_ids([]), floats([])) if partial is None else (partial.response.token_ids, partial.response.logprobs)
        )
        stop = max(first, len(tokens)) if ended is None else ended.stop
        return RecordedResponse(
            tokens.slice(first, stop - first).to_pylist() if len(tokens) > first else [],
            logprobs.slice(first, stop - first).to_pylist() if len(tokens) > first else [],
            cached + len(request.token_ids),
            cached,
            "" if ended is None else ended.finish_reason,
            bool(request.rewritten),
        )

    def _end_order(self, name: str, episode: OpenEpisode, report: AgentReport) -> EpisodeEnd:
        with self._table.locked():
            lease, replica, incarnation = episode.lease, episode.replica, episode.incarnation
        selected = self._table.segments(name, self._branches, self._most_tokens, report)
        return EpisodeEnd(
            trajectory_id=name,
            lease=lease,
            replica=replica,
            incarnation=incarnation,
            segments=selected.segments,
            reward=report.reward,
            answer=report.answer,
            error=report.error,
            written_at=self._now(),
            branches=self._branches,
            messages=selected.messages,
            rewards=selected.rewards,
        )


def _ended(episode: OpenEpisode, options: TurnOptions) -> RequestedTurn | None:
    """The turn of a request, if it has a response."""
    turn = episode.turns.get(options.turn_id)
    return turn if turn is not None and turn.ended is not None else None


def send_order(producer: BoundedProducer, inbox: str, order: TurnRequest | EpisodeEnd) -> None:
    """Write `order` to topic `inbox`, to the partition of its replica, at once and outside of transactions.

    Raises what `BoundedProducer.send` raises.
    """
    value, headers = encode(order)
    producer.send(inbox, value, headers=headers, partition=inbox_partition(order.replica))


def stops_of(value: Any) -> tuple[str, ...]:
    """The stop strings of a request. Raises ApiError."""
    strings: Sequence[Any] = [value] if isinstance(value, str) else value or []
    if not isinstance(strings, list) or len(strings) > 16 or not all(isinstance(s, str) and s for s in strings):
        raise invalid("stop must be a string or a list of up to 16 strings, none of them empty", "stop")
    return tuple(strings)
