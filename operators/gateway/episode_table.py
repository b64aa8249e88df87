"""The episodes of agents, folded from the log: owner, tokens, turns and conversations of each. Thread-safe.

The fold of the pipeline writes it; the HTTP server reads it, and waits for changes. Nothing in it exists only here, so
any gateway of the run can answer any request.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from operators.gateway.conversation import RecordedConversations, RecordedPrefix, by_digest, response_digest
from operators.gateway.reports import NO_REPORT, AgentReport
from operators.gateway.segments import ReadResponse, Selected, segments_of
from operators.gateway.turn_tree import CompleteTurn
from operators.io.elements import PartitionKey, ReceivedRecord
from operators.io.finished import FinishedTrajectories
from operators.io.partial_pool import PartialPool, PooledPartial
from schemas.records import AGENT, Assignment, Branches, Progress, Prompt, Trajectory, TurnEnded, TurnRequest
from schemas.records.agents import extended

log = logging.getLogger(__name__)

MAX_EARLY = 10_000
"""Trajectories of which records are kept that were read before the assignment."""


@dataclass(frozen=True, slots=True)
class RequestedTurn:
    """A request, and its end if the response is complete."""

    request: TurnRequest
    ended: TurnEnded | None = None


@dataclass(slots=True, eq=False)
class OpenEpisode:
    """An episode whose trajectory has not finished. `lease`, `replica` and `incarnation` are those of its owner."""

    prompt: Prompt
    member: int
    lease: int
    replica: int
    incarnation: int
    turns: dict[str, RequestedTurn] = field(default_factory=dict)
    """By turn id, in the order of their first record."""
    requested: set[str] = field(default_factory=set)
    """The ids of all its turns, of those too whose tokens its owner does not have."""
    pending: TurnRequest | None = None
    """The turn whose response is being generated."""
    recorded: RecordedConversations = field(default_factory=RecordedConversations)
    early_ends: dict[str, TurnEnded] = field(default_factory=dict)
    """Ends that were read before their requests, by turn id: the log has no order between topics."""
    offsets: dict[PartitionKey, int] = field(default_factory=dict)
    """The first offset of its records, by partition."""
    assigned_at: int = 0
    """When it was first assigned, in Unix milliseconds."""
    tool_calls: int = 0
    """Calls of tools in its responses."""

    def ended_turns(self) -> list[CompleteTurn]:
        """The turns with a response, in their order."""
        found = [
            CompleteTurn(turn.request, turn.ended)
            for turn in self.turns.values()
            if turn.ended is not None and turn.ended.finish_reason != "failed"
        ]
        return sorted(found, key=lambda turn: turn.request.start)


class EpisodeTable:
    """`state` is that of the last commit; `read_response` turns the tokens of a response into a message.

    `notify` is called, in the thread of the fold, with the names of changed episodes; `on_finished` with each episode
    that finishes and the record that ends it.
    """

    def __init__(
        self,
        partitions: int,
        read_response: ReadResponse,
        notify: Callable[[set[str]], None],
        state: Mapping[str, int] | None = None,
        on_finished: Callable[[OpenEpisode, ReceivedRecord], None] = lambda episode, received: None,
    ) -> None:
        self._read_response, self._notify, self._on_finished = read_response, notify, on_finished
        self._lock = threading.RLock()
        self._episodes: dict[str, OpenEpisode] = {}
        self._pool = PartialPool()
        self._finished = FinishedTrajectories(partitions, state)
        self._early: dict[str, tuple[int, list[ReceivedRecord]]] = {}
        """By trajectory: `_assignments` when the first was read, and records that were read before its assignment."""
        self._others: set[str] = set()
        """Unfinished trajectories without an agent."""
        self._firsts: dict[PartitionKey, list[tuple[int, str]]] = {}
        """By partition, a heap of the first offsets of episodes; of finished ones, too, until they are its first."""
        self._assignments = 0
        """Assignments that have been read."""
        self._errors: dict[str, str | None] = {}
        """Why recently finished episodes failed; None for those that did not."""

    # -- reading, from any thread -------------------------------------------------------------------------------------

    def get(self, name: str) -> OpenEpisode | None:
        """The episode `name`, if it has been assigned and has not finished. Read it within `locked`."""
        return self._episodes.get(name)

    def locked(self) -> threading.RLock:
        """The lock under which episodes change."""
        return self._lock

    def names(self) -> list[str]:
        """The episodes that have not finished."""
        with self._lock:
            return list(self._episodes)

    def has_finished(self, name: str) -> bool:
        """Whether the trajectory of the episode has finished."""
        with self._lock:
            return name in self._finished

    def error_of(self, name: str) -> str | None:
        """Why the finished episode failed; None if it did not, or finished long ago."""
        return self._errors.get(name)

    def tokens(self, name: str) -> PooledPartial | None:
        """The recorded tokens of the episode; None if it has none."""
        with self._lock:
            return self._pool.get(name)

    def length(self, name: str) -> int:
        """The number of its recorded tokens."""
        partial = self.tokens(name)
        return 0 if partial is None else len(partial)

    def segments(self, name: str, branches: Branches, most_tokens: int, report: AgentReport = NO_REPORT) -> Selected:
        """The conversations to train, that of the last turn first: see `segments_of`."""
        with self._lock:
            episode, partial = self._episodes.get(name), self._pool.get(name)
            if episode is None or partial is None:
                return Selected((), "[]")
            turns = [turn for turn in episode.ended_turns() if turn.ended.stop <= len(partial)]
            tokens = partial.response.token_ids.to_numpy()
            drawn = partial.response.loss_mask.to_numpy(zero_copy_only=False)
        return segments_of(turns, tokens, drawn, self._read_response, branches, most_tokens, report)

    def announce(self, order: TurnRequest) -> None:
        """Record a request that this gateway is about to write."""
        with self._lock:
            if order.trajectory_id in self._episodes:
                self._request(order)

    # -- folding ------------------------------------------------------------------------------------------------------

    def fold(self, records: Sequence[ReceivedRecord]) -> None:
        """Apply `records`, in order, and notify."""
        changed: set[str] = set()
        with self._lock:
            for received in records:
                record = received.record
                self._assignments += isinstance(record, Assignment)
                match record:
                    case Assignment() if record.prompt.environment == AGENT:
                        self._assign(received, record)
                    case Assignment():
                        self._ignore(record.trajectory_id)
                        continue
                    case TurnRequest() if self._is_pending(record):  # announced here: nobody waits to see it in the log
                        self._play(received, record)
                        continue
                    case Progress() | TurnRequest() | TurnEnded():
                        self._play(received, record)
                    case Trajectory():
                        self._finish(received, record)
                    case _:
                        continue
                changed.add(record.trajectory_id)
            self._forget_early()
        if changed:
            self._notify(changed)

    def low_water(self, positions: Mapping[PartitionKey, int]) -> dict[PartitionKey, int]:
        """The offsets from which a restart must read again."""
        with self._lock:
            found = self._finished.low_water(positions)
            needed = [(_place(early), early.offset) for _, records in self._early.values() for early in records]
            needed += [(place, first) for place in self._firsts if (first := self._first(place)) is not None]
            for place, offset in needed:
                found[place] = min(found.get(place, offset), offset)
        return {place: offset for place, offset in found.items() if place in positions}

    def _first(self, place: PartitionKey) -> int | None:
        """The first offset in `place` of an open episode's record."""
        firsts = self._firsts[place]
        while firsts and firsts[0][1] not in self._episodes:
            heappop(firsts)
        return firsts[0][0] if firsts else None

    def state(self) -> dict[str, int]:
        """The finished trajectories, for the commit note."""
        with self._lock:
            return self._finished.state()

    def _assign(self, received: ReceivedRecord, record: Assignment) -> None:
        name = record.trajectory_id
        if name in self._finished:
            return
        episode = self._episodes.get(name)
        if episode is None:
            episode = self._episodes[name] = OpenEpisode(
                record.prompt, record.member, record.lease, record.replica, record.incarnation
            )
            episode.assigned_at = record.assigned_at
        elif record.lease <= episode.lease:
            return
        episode.lease, episode.replica, episode.incarnation = record.lease, record.replica, record.incarnation
        self._note_offset(name, episode, received)
        if self._pool.lease(name) < record.lease:  # else its first progress has been read
            self._start_lease(name, episode, record)
        _, records = self._early.pop(name, (0, ()))
        for early in records:
            self._play(early, early.record)

    def _ignore(self, name: str) -> None:
        """Keep no records of a trajectory without an agent."""
        self._early.pop(name, None)
        if name not in self._finished:
            self._others.add(name)

    def _is_pending(self, record: TurnRequest) -> bool:
        """Whether the response to this order is being generated, as far as is known."""
        episode = self._episodes.get(record.trajectory_id)
        pending = None if episode is None else episode.pending
        return pending is not None and (pending.turn_id, pending.lease) == (record.turn_id, record.lease)

    def _start_lease(self, name: str, episode: OpenEpisode, record: Assignment) -> None:
        partial = None if record.partial is None else PooledPartial(record.partial, record.version_spans)
        self._pool.start_lease(name, record.lease, partial)
        self._forget_beyond(episode, 0 if partial is None else len(partial))

    def _play(self, received: ReceivedRecord, record: Progress | TurnRequest | TurnEnded) -> None:
        name = record.trajectory_id
        episode = self._episodes.get(name)
        if episode is None:
            if name not in self._finished and name not in self._others:
                self._early.setdefault(name, (self._assignments, []))[1].append(received)
            return
        self._note_offset(name, episode, received)
        if isinstance(record, TurnRequest):
            self._request(record)
        elif isinstance(record, TurnEnded):
            self._end_turn(record)
        else:
            self._pool.fold(record)
            if record.next_owner is not None:
                self._pool.hand_over(name, record.next_owner.lease)

    def _note_offset(self, name: str, episode: OpenEpisode, received: ReceivedRecord) -> None:
        place = _place(received)
        if received.offset < episode.offsets.get(place, received.offset + 1):
            episode.offsets[place] = received.offset
            heappush(self._firsts.setdefault(place, []), (received.offset, name))

    def _forget_beyond(self, episode: OpenEpisode, tokens: int) -> None:
        """Forget turns of which the next owner does not have all tokens: they are generated again."""
        for turn_id, turn in list(episode.turns.items()):
            if turn.ended is not None and turn.ended.stop > tokens:
                del episode.turns[turn_id]
        if episode.pending is not None and episode.pending.start > tokens:
            episode.pending = None
        episode.recorded.requests = by_digest(episode.recorded.requests, tokens)
        episode.recorded.responses = by_digest(episode.recorded.responses, tokens)

    def _request(self, record: TurnRequest) -> None:
        episode = self._episodes[record.trajectory_id]
        episode.requested.add(record.turn_id)
        known = episode.turns.get(record.turn_id)
        if known is not None and known.ended is not None:
            return
        episode.turns[record.turn_id] = RequestedTurn(record)
        pending = episode.pending
        if pending is None or pending.turn_id == record.turn_id or pending.start < record.start:
            episode.pending = record
        if (ended := episode.early_ends.pop(record.turn_id, None)) is not None:
            self._end_turn(ended)

    def _end_turn(self, record: TurnEnded) -> None:
        name = record.trajectory_id
        episode = self._episodes[name]
        if record.lease < episode.lease and record.stop > self.length(name):
            return  # the present owner does not have its tokens
        turn = episode.turns.get(record.turn_id)
        given = 0 if turn is None else turn.request.start + len(turn.request.token_ids)
        if record.stop < given and record.finish_reason != "failed":
            log.warning(
                "the end of turn %s of episode %s, token %d, is before its response, which begins at %d: it is ignored",
                *(record.turn_id[:80], name, record.stop, given),
            )
            return
        pending = episode.pending
        # An order of another turn from within this one came from a gateway that had not read this one's request yet.
        if pending is not None and (
            pending.start <= record.start or (pending.turn_id != record.turn_id and pending.start < record.stop)
        ):
            episode.pending = None
        if turn is None:
            episode.early_ends[record.turn_id] = record
            return
        if turn.ended is not None:
            return
        episode.turns[record.turn_id] = RequestedTurn(turn.request, record)
        partial = self._pool.get(name)
        if record.finish_reason == "failed" or partial is None or len(partial) < record.stop:
            return
        self._record_conversation(episode, turn.request, record, partial)

    def _record_conversation(
        self, episode: OpenEpisode, request: TurnRequest, ended: TurnEnded, partial: PooledPartial
    ) -> None:
        given = request.start + len(request.token_ids)
        asked = extended(request.context, request.start, given)
        response = partial.response.token_ids.slice(given, ended.stop - given).to_pylist()
        message = self._read_response(request, response)
        episode.tool_calls += len(message.get("tool_calls") or ())
        whole = extended(asked, given, ended.stop)
        episode.recorded.requests.setdefault(request.digest, asked)
        digest = response_digest(request.digest, message)
        last = response[-1] if response else -1
        episode.recorded.responses.setdefault(digest, RecordedPrefix(whole, last))

    def _finish(self, received: ReceivedRecord, record: Trajectory) -> None:
        name = record.trajectory_id
        self._finished.add(received, record)
        if (episode := self._episodes.pop(name, None)) is not None:
            self._on_finished(episode, received)
            self._errors[name] = record.error
            while len(self._errors) > 10_000:
                del self._errors[next(iter(self._errors))]
        self._pool.drop(name)
        self._early.pop(name, None)
        self._others.discard(name)

    def _forget_early(self) -> None:
        """Forget the oldest early records: one whose assignment never comes must not stay, or be read at each start."""
        while self._early:
            oldest, (read_at, _) = next(iter(self._early.items()))
            if len(self._early) <= MAX_EARLY and self._assignments - read_at <= MAX_EARLY:
                break
            del self._early[oldest]


def _place(received: ReceivedRecord) -> PartitionKey:
    return PartitionKey(received.topic, received.partition)
