"""Episodes of agents on an engine of single requests: each turn is a request of an agent, which comes from the log.

`AgentEngine` is itself an engine. Between two turns an episode is in no batch: it waits for a TurnRequest of a gateway.
The tokens of an episode are a log: each turn appends its new tokens and then its response. What the model reads in a
turn is a choice of ranges of that log, so a conversation that an agent forks or shortens is generated from recorded
tokens too. The state of an episode is its tokens and their loss mask; the gateway has the conversations.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from operators.rollout.engine import KV, Completion, Engine, EngineStatus, PartialResponse, Request
from operators.rollout.episodes import EMPTY_RESPONSE
from operators.rollout.turns import append_observation
from operators.rollout.wrapped_engine import WrappedEngine
from schemas.records import AGENT, Conversation, Episode, EpisodeEnd, Segment, TokenRange, TurnRequest
from schemas.records.agents import extended

MAX_EARLY_ORDERS = 4096
"""Orders kept for episodes that have not started here."""

TurnReason = Literal["stop", "length", "failed"]


class EndedTurn(NamedTuple):
    """A finished turn: the tokens `start` to before `stop` of its episode."""

    trajectory_id: str
    turn_id: str
    start: int
    stop: int
    finish_reason: TurnReason
    error: str | None


@dataclass(slots=True, eq=False)
class _AgentEpisode:
    """An episode: its tokens, those of the response of the active `turn` excepted.

    `kv` is that of the tokens in `kv_ranges`.
    """

    request: Request
    known: PartialResponse
    turn: TurnRequest | None = None
    kv: KV | None = None
    kv_ranges: tuple[TokenRange, ...] = ()

    @property
    def name(self) -> str:
        return self.request.trajectory_id


class AgentEngine(WrappedEngine):
    """`engine` with episodes of agents; requests of other prompts pass through.

    The KV of waiting episodes is kept, in at most `kv_bytes` bytes together, so that the next turn need not recompute
    it.
    """

    def __init__(self, engine: Engine, kv_bytes: int = 0) -> None:
        super().__init__(engine)
        self._kv_bytes = kv_bytes
        self._active: dict[str, _AgentEpisode] = {}
        self._ends: dict[str, EpisodeEnd] = {}
        """The orders that end active episodes in the next step."""
        self._early: OrderedDict[str, TurnRequest | EpisodeEnd] = OrderedDict()
        self._ended_turns: list[EndedTurn] = []

    def submit(self, request: Request) -> None:
        """As the engine's."""
        prompt = request.environment_prompt
        if prompt is None or prompt.environment != AGENT:
            self._engine.submit(request)
            return
        name = request.trajectory_id
        if name in self._active:
            raise ValueError(f"trajectory {name!r} is already in the engine")
        known = EMPTY_RESPONSE if request.partial is None else replace(request.partial, kv=None)
        self._active[name] = _AgentEpisode(request, replace(known, loss_mask=known.drawn))
        if (order := self._early.pop(name, None)) is not None:
            self.accept(order)

    def accept(self, order: TurnRequest | EpisodeEnd) -> None:
        """Start a turn, or end an episode in the next step. A turn that does not follow from the episode's tokens is
        ignored.

        One for an episode that has not started is kept until it does.
        """
        episode = self._active.get(order.trajectory_id)
        if episode is None:
            self._keep_early(order)
        elif isinstance(order, EpisodeEnd):
            self._ends[episode.name] = order
        elif episode.turn is None and episode.name not in self._ends:
            self._start_turn(episode, order)

    def in_turn(self) -> bool:
        """Whether an agent waits for a response."""
        return any(each.turn is not None for each in self._active.values())

    def streaming(self) -> list[str]:
        """The episodes whose agent reads the response while it is generated."""
        return [name for name, each in self._active.items() if each.turn is not None and each.turn.stream]

    def take_ended_turns(self) -> list[EndedTurn]:
        """The turns that ended since the last call."""
        ended, self._ended_turns = self._ended_turns, []
        return ended

    def step(self) -> Sequence[Completion]:
        """One round of the engine; returns finished requests, and episodes that their agents ended."""
        ends, self._ends = self._ends, {}
        ended = [self._end(self._active.pop(name), order) for name, order in ends.items()]
        for completion in self._engine.step():
            episode = self._active.get(completion.trajectory_id)
            if episode is None or episode.turn is None:
                ended.append(completion)
            else:
                self._finish_turn(episode, episode.turn, completion)
        return ended

    def due(self) -> float:
        """As the engine's; 0 if a turn has ended or an episode ends."""
        return 0.0 if self._ends or self._ended_turns else self._engine.due()

    def release(self, trajectory_ids: Collection[str], *, with_kv: bool = False) -> dict[str, PartialResponse]:
        """As the engine's, without KV for episodes; the gateway repeats an unfinished turn or end at the next owner."""
        released = dict(self._engine.release(trajectory_ids, with_kv=with_kv))
        for episode in [self._active.pop(name) for name in trajectory_ids if name in self._active]:
            released[episode.name] = _joined(episode.known, released.get(episode.name))
            if (order := self._ends.pop(episode.name, episode.turn)) is not None:
                self._keep_early(order)  # it continues if the episode resumes here
        return released

    def generated(self, since: Mapping[str, int]) -> dict[str, PartialResponse]:
        """As the engine's, loss masks included."""
        known = {name: len(self._active[name].known.token_ids) for name in since if name in self._active}
        found = self._engine.generated({name: max(0, at - known.get(name, 0)) for name, at in since.items()})
        for name in known:
            found[name] = _joined(self._active[name].known.since(since[name]), found.get(name))
        return found

    def status(self) -> EngineStatus:
        """The engine's load; episodes that wait for their agent count as running."""
        status = self._engine.status()
        waiting = sum(each.turn is None for each in list(self._active.values()))  # other threads read it, too
        return replace(status, running=status.running + waiting)

    # -- one episode --------------------------------------------------------------------------------------------------

    def _keep_early(self, order: TurnRequest | EpisodeEnd) -> None:
        self._early[order.trajectory_id] = order
        self._early.move_to_end(order.trajectory_id)
        if len(self._early) > MAX_EARLY_ORDERS:
            self._early.popitem(last=False)

    def _start_turn(self, episode: _AgentEpisode, turn: TurnRequest) -> None:
        """Submit `turn` to the engine, or what is left of it if a previous owner has begun it."""
        known, new = episode.known, turn.token_ids.to_numpy()
        given = turn.start + len(new)
        if turn.start > len(known.token_ids):
            return
        begun = known.token_ids[turn.start : given]
        if not np.array_equal(begun, new[: len(begun)]) or known.drawn[turn.start : given].any():
            return  # another turn has followed the tokens before `start`
        response = known.since(given) if len(known.token_ids) > given else None
        if response is not None and not response.drawn.all():
            return
        if response is not None:
            known = PartialResponse(known.token_ids[:given], known.logprobs[:given], loss_mask=known.drawn[:given])
        known = append_observation(known, new[len(begun) :].tolist())
        sampling = episode.request.sampling
        room = sampling.max_new_tokens - given
        kv = episode.kv if episode.kv_ranges == turn.context else None
        partial = response if response is not None or kv is None else replace(EMPTY_RESPONSE, kv=kv)
        episode.known, episode.kv = replace(known, kv=None), None
        try:
            if room < 1:
                raise ValueError(f"the episode's budget of {sampling.max_new_tokens} tokens is used up")
            self._engine.submit(
                Request(
                    episode.name,
                    np.concatenate([known.token_ids[positions_in(turn.context)], new]),
                    replace(
                        sampling,
                        max_new_tokens=min(turn.max_tokens, room),
                        stop_strings=(*sampling.stop_strings, *turn.stop_strings),
                        seed=_turn_seed(sampling.seed, turn.start),
                    ),
                    None if partial is None else replace(partial, loss_mask=None),
                    keep_kv=self._kv_bytes > 0,
                )
            )
        except ValueError as error:
            self._ended_turns.append(EndedTurn(episode.name, turn.turn_id, turn.start, given, "failed", str(error)))
            return
        episode.turn = turn

    def _finish_turn(self, episode: _AgentEpisode, turn: TurnRequest, completion: Completion) -> None:
        generated = completion.generated
        episode.known, episode.turn = _joined(episode.known, generated), None
        stop = len(episode.known.token_ids)
        if self._has_memory_for(generated.kv):
            episode.kv = generated.kv
            episode.kv_ranges = extended(turn.context, turn.start, stop)
        reason: TurnReason = completion.finish_reason  # type: ignore[assignment]
        self._ended_turns.append(EndedTurn(episode.name, turn.turn_id, turn.start, stop, reason, completion.error))

    def _has_memory_for(self, kv: KV | None) -> bool:
        held = sum(len(each.kv.data) for each in self._active.values() if each.kv is not None)
        return kv is not None and held + len(kv.data) <= self._kv_bytes

    def _end(self, episode: _AgentEpisode, order: EpisodeEnd) -> Completion:
        """End `episode`: its segments become the trajectory's prompt and response."""
        released = self._engine.release([episode.name])
        known = _joined(episode.known, released.get(episode.name))
        joined = join_segments(
            *(order.segments, order.messages or "[]", known.drawn),
            whole=order.branches == "tree",
            rewards=order.rewards or (),
        )
        error = order.error
        if error is None and joined.missing:
            error = f"the episode has only {len(known.token_ids)} tokens"
        elif error is None and not len(joined.prompt):
            error = "the agent made no request"
        prompt, response = joined.prompt, joined.response
        rewards = () if order.reward is None else (order.reward,)
        generated = PartialResponse(known.token_ids[response], known.logprobs[response], loss_mask=joined.trained)
        return Completion(
            episode.name,
            generated,
            "stop" if error is None else "failed",
            error,
            Episode(rewards, "done" if error is None else "failed"),
            known.token_ids[prompt] if len(prompt) else None,
            response if len(prompt) else None,
            order.answer,
            joined.conversations,
            joined.rewards,
        )


def _joined(known: PartialResponse, drawn: PartialResponse | None) -> PartialResponse:
    """`known` followed by tokens that the model has drawn."""
    if drawn is None:
        return known
    return PartialResponse(
        np.concatenate([known.token_ids, drawn.token_ids]),
        np.concatenate([known.logprobs, drawn.logprobs]),
        loss_mask=np.concatenate([known.drawn, np.ones(len(drawn.token_ids), bool)]),
    )


def _turn_seed(seed: int, start: int) -> int:
    """The seed of the turn at position `start`: turns with equal positions must not draw equal numbers."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{start}".encode(), digest_size=7).digest(), "little")


class JoinedSegments(NamedTuple):
    """Positions among the tokens of the episode, int64, and which of the response are trained, bool.

    `rewards` has the agent's own report of each conversation; empty without one. `missing`: a segment has positions
    beyond the tokens, so nothing is joined.
    """

    prompt: np.ndarray
    response: np.ndarray
    trained: np.ndarray
    conversations: tuple[Conversation, ...]
    rewards: tuple[float, ...] = ()
    missing: bool = False


def join_segments(
    segments: Sequence[Segment], messages: str, drawn: np.ndarray, *, whole: bool, rewards: Sequence[float] = ()
) -> JoinedSegments:
    """Join `segments` of an episode of which the model has drawn the tokens `drawn`, bool[t].

    `messages` is a JSON list with those of each, `rewards` has the agent's own report of each. The prompt is that of
    the first. A token in several is trained in the first of them, if `whole` in each.
    """
    nothing = JoinedSegments(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, bool), ())
    if any(each.stop > len(drawn) for segment in segments for each in segment.ranges):
        return nothing._replace(missing=True)
    prompt, parts, masks = nothing.prompt, [nothing.response], [nothing.trained]
    conversations: list[Conversation] = []
    own: list[float] = []
    untrained = drawn.copy()
    length = 0
    said = _texts(messages)
    for number, (segment, text) in enumerate(zip(segments, said + [""] * (len(segments) - len(said)), strict=False)):
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
        own += rewards[number : number + 1]
        parts.append(positions)
        masks.append(trained)
        length += len(positions)
    return JoinedSegments(prompt, np.concatenate(parts), np.concatenate(masks), tuple(conversations), tuple(own))


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
