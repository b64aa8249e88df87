"""Multi-turn episodes on an engine of single requests: each turn is a request that resumes all tokens so far.

`EpisodeEngine` is itself an engine, whose requests are whole episodes. Between two turns a trajectory is in no batch:
its environment steps in another process (see environments/pool.py) while the engine runs the others. The tokens of an
observation are appended and never encoded again. The state of an episode is its tokens and their loss mask; after a
move, a resumption or an interrupt the environment is replayed from the texts of the turns.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from infra.models.chat import MessageFrame
from operators.rollout.engine import KV, NOTHING_GENERATED, Completion, Engine, EngineStatus, PartialResponse, Request
from operators.rollout.environments.contract import EpisodeState
from operators.rollout.environments.pool import EnvironmentFailed, EnvironmentPool
from operators.rollout.stop_strings import StoppingEngine
from operators.rollout.turns import append_observation, last_turn, observation_ranges, turn_ranges, with_loss_mask
from operators.rollout.wrapped_engine import WrappedEngine
from schemas.records import MAX_MESSAGES_CHARACTERS, Conversation, Ending, Episode

ENVIRONMENT_WAIT_S = 0.005
"""A step without other work waits so many seconds for an environment."""
RECENT_REQUEST_S = 0.1
"""For so many seconds after a request the engine polls for the reply; later replies wait for the next step."""
EMPTY_RESPONSE = replace(NOTHING_GENERATED, loss_mask=np.zeros(0, bool))


@dataclass(slots=True, eq=False)
class _ActiveEpisode:
    """An active episode: its tokens before the engine resumes it, or while the environment's `reply` is pending."""

    request: Request
    pool: EnvironmentPool
    known: PartialResponse
    reply: Future[EpisodeState] | None = None
    requested_at: float = 0.0
    verified: list[str | None] = field(default_factory=list)
    """Observations that were compared with the tokens."""
    rewards: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return self.request.trajectory_id

    @property
    def turn(self) -> range | None:
        """The turn at the end of the known tokens; None if they are empty or end with an observation."""
        return last_turn(self.known.drawn)

    @property
    def full(self) -> bool:
        """Whether the token limit is reached."""
        return len(self.known.token_ids) >= self.request.sampling.max_new_tokens


class EpisodeEngine(WrappedEngine):
    """`engine` with the environments of `pools`, by the name that prompts use.

    `encode` and `decode` are the tokenizer's; `frames` has the message frame of each environment whose observations are
    messages. Requests without an environment pass through.
    """

    def __init__(
        self,
        engine: Engine,
        pools: Mapping[str, EnvironmentPool],
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        frames: Mapping[str, MessageFrame] | None = None,
    ) -> None:
        super().__init__(StoppingEngine(engine, decode))
        self._pools, self._encode, self._decode = pools, encode, decode
        self._frames = frames or {}
        self._active: dict[str, _ActiveEpisode] = {}

    def submit(self, request: Request) -> None:
        """As the engine's; also raises ValueError for an unknown environment."""
        if request.environment_prompt is None:
            self._engine.submit(request)
            return
        name = request.environment_prompt.environment
        if name not in self._pools:
            raise ValueError(f"there is no environment {name!r}: rollout.environments has {sorted(self._pools)}")
        if request.trajectory_id in self._active:
            raise ValueError(f"trajectory {request.trajectory_id!r} is already in the engine")
        known = EMPTY_RESPONSE if request.partial is None else request.partial
        if known.loss_mask is None:
            known = replace(known, loss_mask=known.drawn)
        episode = self._active[request.trajectory_id] = _ActiveEpisode(request, self._pools[name], known)
        if len(known.token_ids):
            self._generate(episode)  # a finished turn completes unchanged
        else:
            self._request_observation(episode)

    def step(self) -> Sequence[Completion]:
        """One round of the engine. Environments process the turns that ended in it while later rounds run."""
        waiting = [each.reply for each in self._active.values() if each.reply is not None]
        if waiting and self._engine.due() > 0:
            wait(waiting, timeout=ENVIRONMENT_WAIT_S, return_when=FIRST_COMPLETED)
        for completion in self._engine.step():
            episode = self._active.get(completion.trajectory_id)
            if episode is None:
                self._ended.append(completion)
            elif completion.finish_reason == "failed":
                episode.known = with_loss_mask(completion.generated, episode.known)
                self._fail(episode, completion.error or "")
            else:
                self._handle_turn_end(episode, completion.generated)
        for episode in [each for each in self._active.values() if each.reply is not None and each.reply.done()]:
            self._handle_reply(episode)
        return self._take_ended()

    def due(self) -> float:
        """As the engine's; 0 if an environment has replied, or was requested less than RECENT_REQUEST_S ago."""
        recent = time.monotonic() - RECENT_REQUEST_S
        pending = [(each.reply, each.requested_at) for each in self._active.values() if each.reply is not None]
        if self._ended or any(requested_at > recent or reply.done() for reply, requested_at in pending):
            return 0.0
        return self._engine.due()

    def release(self, trajectory_ids: Collection[str], *, with_kv: bool = False) -> dict[str, PartialResponse]:
        """As the engine's; the next owner repeats a pending environment request."""
        released = self._engine.release(trajectory_ids, with_kv=with_kv)
        for episode in [self._active.pop(name) for name in trajectory_ids if name in self._active]:
            generated = released.get(episode.name)
            if generated is not None:
                released[episode.name] = with_loss_mask(generated, episode.known)
            else:
                released[episode.name] = replace(episode.known, kv=None)
            if episode.reply is not None:
                episode.reply.cancel()
        return released | self._release_ended(trajectory_ids)

    def generated(self, since: Mapping[str, int]) -> dict[str, PartialResponse]:
        """As the engine's, loss masks included."""
        found = self._engine.generated(since)
        for name in [name for name in since if name in self._active]:
            known, start = self._active[name].known, since[name]
            found[name] = with_loss_mask(found[name], known, start) if name in found else known.since(start)
        return found

    def status(self) -> EngineStatus:
        """The engine's load; episodes that wait for an environment count as running, because they return."""
        status = self._engine.status()
        pending = sum(each.reply is not None for each in list(self._active.values()))  # other threads read it, too
        return replace(status, running=status.running + pending, waiting=status.waiting + len(self._ended))

    # -- one episode --------------------------------------------------------------------------------------------------

    def _generate(self, episode: _ActiveEpisode) -> None:
        """Submit the next turn, or the rest of an unfinished one, to the engine."""
        request, known = episode.request, episode.known
        turn, sampling, pool = episode.turn, request.sampling, episode.pool
        if turn is None and len(known.token_ids) and int(known.token_ids[-1]) in sampling.stop_token_ids:
            self._fail(episode, "the observation ends with a stop token")
            return
        start = len(known.token_ids) if turn is None else turn.start
        most = min(start + (pool.spec.turn_tokens or sampling.max_new_tokens), sampling.max_new_tokens)
        sampling = replace(sampling, max_new_tokens=most, stop_strings=(*sampling.stop_strings, *pool.stop))
        episode.reply = None
        partial = known if len(known.token_ids) else None
        episode.known = replace(known, kv=None)
        try:
            keep = pool.spec.kv_megabytes > 0
            self._engine.submit(
                replace(request, sampling=sampling, partial=partial, environment_prompt=None, keep_kv=keep)
            )
        except ValueError as error:
            self._fail(episode, str(error))

    def _handle_turn_end(self, episode: _ActiveEpisode, generated: PartialResponse) -> None:
        """Handle a turn that the engine finished, or that had already finished."""
        known = with_loss_mask(generated, episode.known)
        kv = generated.kv if self._has_memory_for(episode, generated.kv) else None
        episode.known = PartialResponse(known.token_ids, known.logprobs, kv, known.drawn)
        if episode.turn is None:  # no token was left for a turn
            self._end(episode, "length", "length")
        else:
            self._request_observation(episode)

    def _has_memory_for(self, episode: _ActiveEpisode, kv: KV | None) -> bool:
        """Whether `kv` fits the environment's `kv_megabytes`, together with that of the other waiting episodes."""
        others = [each.known.kv for each in self._active.values() if each.pool is episode.pool and each is not episode]
        held = sum(len(each.data) for each in others if each is not None)
        return kv is not None and held + len(kv.data) <= episode.pool.spec.kv_megabytes * 1_000_000

    def _request_observation(self, episode: _ActiveEpisode) -> None:
        """Send the turns so far to the environment."""
        prompt_record, known = episode.request.environment_prompt, episode.known
        assert prompt_record is not None
        runs = turn_ranges(known.drawn)
        texts = [self._decode(known.token_ids[run.start : run.stop].tolist()) for run in runs]
        prompt = {"text": prompt_record.text, "task": prompt_record.task, "number": prompt_record.number}
        try:
            prompt["reference"] = json.loads(prompt_record.reference)
        except ValueError as error:
            self._fail(episode, f"the reference is not valid JSON: {error}")
            return
        last = episode.full or len(runs) >= episode.pool.spec.turns
        episode.reply = episode.pool.play(episode.name, prompt, texts, last=last)
        episode.requested_at = time.monotonic()

    def _handle_reply(self, episode: _ActiveEpisode) -> None:
        """Append the observation and continue the episode, or end it."""
        assert episode.reply is not None
        try:
            state = episode.reply.result()
        except EnvironmentFailed as failed:
            self._fail(episode, str(failed))
            return
        known, spec = episode.known, episode.pool.spec
        count = len(turn_ranges(known.drawn))
        divergence = self._find_divergence(episode, state)
        if divergence is not None:
            self._fail(episode, divergence)
            return
        episode.verified, episode.rewards = state.observations, tuple(state.rewards)
        if state.done:
            self._end(episode, "stop", "done")
        elif episode.full:
            self._end(episode, "length", "length")
        elif count >= spec.turns:
            self._end(episode, "length", "turns")
        else:
            self._observe(episode, state.observations[-1] or "", first=not count)

    def _observe(self, episode: _ActiveEpisode, observation: str, first: bool) -> None:
        token_ids = self._encode_observation(episode, observation, len(episode.known.token_ids))
        if not token_ids and not first:
            self._fail(episode, "the observation is empty, but the episode is not done")
        elif len(episode.known.token_ids) + len(token_ids) >= episode.request.sampling.max_new_tokens:
            self._end(episode, "length", "length")
        else:
            episode.known = append_observation(episode.known, token_ids)
            self._generate(episode)

    def _encode_observation(self, episode: _ActiveEpisode, observation: str, at: int) -> list[int]:
        """The tokens of `observation` at position `at` of the response, with the message frame."""
        token_ids = self._encode(observation)
        frame = self._frames.get(episode.pool.spec.resolved_name)
        if frame is None or not token_ids:
            return token_ids
        return frame.around(token_ids, self._ended_before(episode, at))

    def _conversation(self, episode: _ActiveEpisode) -> Conversation:
        """The messages of the prompt, of the turns and of the observations between them."""
        prompt, known = episode.request.environment_prompt, episode.known
        assert prompt is not None
        messages = [asdict(each) for each in prompt.messages]
        messages = messages or [{"role": "user", "content": prompt.text}]
        between = observation_ranges(known.drawn)
        for number, (before, turn) in enumerate(zip(between, turn_ranges(known.drawn), strict=True)):
            if before:
                text = self._observation_text(episode, number, before)
                messages.append({"role": episode.pool.spec.role or "user", "content": text})
            text = self._decode(known.token_ids[turn.start : turn.stop].tolist())
            messages.append({"role": "assistant", "content": text})
        recorded = json.dumps(messages, ensure_ascii=False)
        whole = len(recorded) <= MAX_MESSAGES_CHARACTERS
        return Conversation(0, len(episode.request.prompt), recorded if whole else "")

    def _observation_text(self, episode: _ActiveEpisode, number: int, tokens: range) -> str:
        """The text of observation `number`, which has `tokens`: that of the environment, or else theirs."""
        text = episode.verified[number] if number < len(episode.verified) else None
        if text is not None:
            return text
        token_ids = episode.known.token_ids[tokens.start : tokens.stop].tolist()
        frame = self._frames.get(episode.pool.spec.resolved_name)
        return self._decode(
            token_ids if frame is None else frame.within(token_ids, self._ended_before(episode, tokens.start))
        )

    def _ended_before(self, episode: _ActiveEpisode, at: int) -> bool:
        """Whether the token before position `at` of the response is a stop token."""
        return at > 0 and int(episode.known.token_ids[at - 1]) in episode.request.sampling.stop_token_ids

    def _find_divergence(self, episode: _ActiveEpisode, state: EpisodeState) -> str | None:
        """The error if a replay of the episode gave another observation than before; None if all are equal."""
        for number, run in enumerate(observation_ranges(episode.known.drawn)):
            if number < len(episode.verified) and state.observations[number] in (episode.verified[number], None):
                continue
            observation = state.observations[number]
            known = episode.known.token_ids[run.start : run.stop].tolist()
            if observation is not None and self._encode_observation(episode, observation, run.start) != known:
                return f"the environment is not deterministic: on replay observation {number} differs"
        return None

    def _end(self, episode: _ActiveEpisode, reason: str, ending: Ending, error: str | None = None) -> None:
        del self._active[episode.name]
        record = Episode(episode.rewards, ending)
        conversations = (self._conversation(episode),)
        self._ended.append(Completion(episode.name, episode.known, reason, error, record, conversations=conversations))

    def _fail(self, episode: _ActiveEpisode, error: str) -> None:
        self._end(episode, "failed", "failed", error)
