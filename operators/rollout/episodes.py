"""Episodes on an engine that knows of none: a turn is a request that completes, the next one resumes from all so far.

`EpisodeEngine` is an engine itself, whose requests are whole episodes. Between two turns a trajectory is in no batch:
its environment answers in another process (see environments/pool.py), while the engine goes on with the others. What is
observed is appended, and never encoded again. Nothing is kept of an episode but its tokens and which of them the model
drew: moved, resumed or interrupted it is played again from the texts of its turns.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from infra.models.chat import MessageFrame
from operators.rollout.engine import KV, Completion, Engine, EngineStatus, PartialResponse, Request
from operators.rollout.environments.contract import EpisodeState
from operators.rollout.environments.pool import EnvironmentFailed, EnvironmentPool
from operators.rollout.request_checks import check_loadable
from operators.rollout.stop_strings import StoppingEngine
from operators.rollout.turns import append_observation, last_turn, observation_ranges, turn_ranges, with_loss_mask
from schemas.records import Ending, Episode, PolicyVersion

ENVIRONMENT_WAIT_S = 0.005
"""How long a step waits for an environment where there is nothing else to do."""
RECENT_REQUEST_S = 0.1
"""How long after it was asked an environment may answer any moment; a later answer waits for the next look."""
EMPTY_RESPONSE = PartialResponse(np.zeros(0, np.int32), np.zeros(0, np.float32), loss_mask=np.zeros(0, bool))


@dataclass(slots=True, eq=False)
class _ActiveEpisode:
    """An episode under way: all that is known before its engine goes on, or while its environment is `asked`."""

    request: Request
    pool: EnvironmentPool
    known: PartialResponse
    asked: Future[EpisodeState] | None = None
    asked_at: float = 0.0
    seen: list[str | None] = field(default_factory=list)
    """Observations that are known to be those in its tokens."""
    rewards: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return self.request.trajectory_id

    @property
    def turn(self) -> range | None:
        """The turn with which what is known ends; None where it ends with what was observed, or is nothing."""
        return last_turn(self.known.drawn)

    @property
    def full(self) -> bool:
        """Whether there is no room for another token."""
        return len(self.known.token_ids) >= self.request.sampling.max_new_tokens


class EpisodeEngine:
    """`engine`, with the environments of `pools` by the name that prompts give them.

    `encode` and `decode` are the tokenizer's; `frames` are what stands around the messages of those environments whose
    words are messages. Requests without an environment pass through.
    """

    def __init__(
        self,
        engine: Engine,
        pools: Mapping[str, EnvironmentPool],
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        frames: Mapping[str, MessageFrame] | None = None,
    ) -> None:
        self._engine = StoppingEngine(engine, decode)
        self._pools, self._encode, self._decode = pools, encode, decode
        self._frames = frames or {}
        self._playing: dict[str, _ActiveEpisode] = {}
        self._ended: list[Completion] = []

    @property
    def version(self) -> PolicyVersion | None:
        """The weight version loaded, None before the first."""
        return self._engine.version

    def load(self, weights: Path, version: PolicyVersion) -> None:
        """As the engine's; raises RuntimeError while an environment is asked, too."""
        check_loadable(self.status(), version)
        self._engine.load(weights, version)

    def submit(self, request: Request) -> None:
        """As the engine's; raises ValueError for an unknown environment, too."""
        if request.environment_prompt is None:
            self._engine.submit(request)
            return
        name = request.environment_prompt.environment
        if name not in self._pools:
            raise ValueError(f"there is no environment {name!r}: rollout.environments has {sorted(self._pools)}")
        if request.trajectory_id in self._playing:
            raise ValueError(f"trajectory {request.trajectory_id!r} is already in the engine")
        known = EMPTY_RESPONSE if request.partial is None else request.partial
        if known.loss_mask is None:
            known = replace(known, loss_mask=known.drawn)
        playing = self._playing[request.trajectory_id] = _ActiveEpisode(request, self._pools[name], known)
        if len(known.token_ids):
            self._generate(playing)  # a turn that has ended completes as it is
        else:
            self._ask(playing)

    def step(self) -> Sequence[Completion]:
        """One round of the engine; those whose turn ended in it are answered meanwhile, and go on in a later one."""
        waits = [each.asked for each in self._playing.values() if each.asked is not None]
        if waits and self._engine.due() > 0:
            wait(waits, timeout=ENVIRONMENT_WAIT_S, return_when=FIRST_COMPLETED)
        for completion in self._engine.step():
            playing = self._playing.get(completion.trajectory_id)
            if playing is None:
                self._ended.append(completion)
            elif completion.finish_reason == "failed":
                playing.known = with_loss_mask(completion.generated, playing.known)
                self._fail(playing, completion.error or "")
            else:
                self._turn_over(playing, completion.generated)
        for playing in [each for each in self._playing.values() if each.asked is not None and each.asked.done()]:
            self._answered(playing)
        ended, self._ended = self._ended, []
        return ended

    def take_started(self) -> Sequence[str]:
        """As the engine's: a trajectory is told of in every turn."""
        return self._engine.take_started()

    def due(self) -> float:
        """As the engine's; 0 where an environment has answered, or may any moment."""
        soon = time.monotonic() - RECENT_REQUEST_S
        waits = [each for each in self._playing.values() if each.asked is not None]
        if self._ended or any(each.asked_at > soon or each.asked.done() for each in waits if each.asked is not None):
            return 0.0
        return self._engine.due()

    def release(self, trajectory_ids: Collection[str], *, with_kv: bool = False) -> dict[str, PartialResponse]:
        """As the engine's; what an environment is asked about is asked again where it goes on."""
        released = self._engine.release(trajectory_ids, with_kv=with_kv)
        for playing in [self._playing.pop(name) for name in trajectory_ids if name in self._playing]:
            generated = released.get(playing.name)
            if generated is not None:
                released[playing.name] = with_loss_mask(generated, playing.known)
            else:
                released[playing.name] = replace(playing.known, kv=None)
            if playing.asked is not None:
                playing.asked.cancel()
        for ended in [each for each in self._ended if each.trajectory_id in set(trajectory_ids)]:
            released[ended.trajectory_id] = ended.generated
            self._ended.remove(ended)
        return released

    def generated(self, since: Mapping[str, int]) -> dict[str, PartialResponse]:
        """As the engine's, loss masks included."""
        found = self._engine.generated(since)
        for name in since.keys() & self._playing.keys():
            known, start = self._playing[name].known, since[name]
            found[name] = with_loss_mask(found[name], known, start) if name in found else known.since(start)
        return found

    def status(self) -> EngineStatus:
        """The engine's load; who waits for an environment counts as running, for it comes back."""
        status = self._engine.status()
        asked = sum(each.asked is not None for each in self._playing.values())
        return replace(status, running=status.running + asked, waiting=status.waiting + len(self._ended))

    def close(self) -> None:
        """Free what the engine holds; the pools are their owner's."""
        self._engine.close()

    # -- one episode --------------------------------------------------------------------------------------------------

    def _generate(self, playing: _ActiveEpisode) -> None:
        """Let the engine make the next turn, or what is missing of it."""
        request, known = playing.request, playing.known
        turn, sampling, pool = playing.turn, request.sampling, playing.pool
        if turn is None and len(known.token_ids) and int(known.token_ids[-1]) in sampling.stop_token_ids:
            self._fail(playing, "what was observed ends with a stop token")
            return
        begun = len(known.token_ids) if turn is None else turn.start
        most = min(begun + (pool.spec.turn_tokens or sampling.max_new_tokens), sampling.max_new_tokens)
        sampling = replace(sampling, max_new_tokens=most, stop_strings=(*sampling.stop_strings, *pool.stop))
        playing.asked = None
        partial = known if len(known.token_ids) else None
        playing.known = replace(known, kv=None)
        try:
            keep = pool.spec.kv_megabytes > 0
            self._engine.submit(
                replace(request, sampling=sampling, partial=partial, environment_prompt=None, keep_kv=keep)
            )
        except ValueError as error:
            self._fail(playing, str(error))

    def _turn_over(self, playing: _ActiveEpisode, generated: PartialResponse) -> None:
        """The engine has made a turn, or the one that it was given had ended."""
        known = with_loss_mask(generated, playing.known)
        kv = generated.kv if self._keeps(playing, generated.kv) else None
        playing.known = PartialResponse(known.token_ids, known.logprobs, kv, known.drawn)
        if playing.turn is None:  # there was no room for one
            self._end(playing, "length", "length")
        else:
            self._ask(playing)

    def _keeps(self, playing: _ActiveEpisode, kv: KV | None) -> bool:
        """Whether there is memory for `kv` beside what those have who wait for the same environment."""
        alike = [each.known.kv for each in self._playing.values() if each.pool is playing.pool and each is not playing]
        held = sum(len(each.data) for each in alike if each is not None)
        return kv is not None and held + len(kv.data) <= playing.pool.spec.kv_megabytes * 1_000_000

    def _ask(self, playing: _ActiveEpisode) -> None:
        """Let the environment answer the turns so far."""
        asked, known = playing.request.environment_prompt, playing.known
        assert asked is not None
        runs = turn_ranges(known.drawn)
        texts = [self._decode(known.token_ids[run.start : run.stop].tolist()) for run in runs]
        prompt = {"text": asked.text, "task": asked.task, "number": asked.number}
        try:
            prompt["reference"] = json.loads(asked.reference)
        except ValueError as error:
            self._fail(playing, f"the reference is no JSON: {error}")
            return
        last = playing.full or len(runs) >= playing.pool.spec.turns
        playing.asked, playing.asked_at = playing.pool.play(playing.name, prompt, texts, last=last), time.monotonic()

    def _answered(self, playing: _ActiveEpisode) -> None:
        """Append what was observed and go on, or end."""
        assert playing.asked is not None
        try:
            played = playing.asked.result()
        except EnvironmentFailed as failed:
            self._fail(playing, str(failed))
            return
        known, spec = playing.known, playing.pool.spec
        count = len(turn_ranges(known.drawn))
        differs = self._difference(playing, played)
        if differs is not None:
            self._fail(playing, differs)
            return
        playing.seen, playing.rewards = played.observations, tuple(played.rewards)
        if played.done:
            self._end(playing, "stop", "done")
        elif playing.full:
            self._end(playing, "length", "length")
        elif count >= spec.turns:
            self._end(playing, "length", "turns")
        else:
            self._observe(playing, played.observations[-1] or "", first=not count)

    def _observe(self, playing: _ActiveEpisode, observation: str, first: bool) -> None:
        token_ids = self._read(playing, observation, len(playing.known.token_ids))
        if not token_ids and not first:
            self._fail(playing, "the environment observed nothing, but the episode goes on")
        elif len(playing.known.token_ids) + len(token_ids) >= playing.request.sampling.max_new_tokens:
            self._end(playing, "length", "length")
        else:
            playing.known = append_observation(playing.known, token_ids)
            self._generate(playing)

    def _read(self, playing: _ActiveEpisode, observation: str, at: int) -> list[int]:
        """`observation` as tokens of the response from `at` on."""
        token_ids = self._encode(observation)
        frame = self._frames.get(playing.pool.spec.resolved_name)
        if frame is None or not token_ids:
            return token_ids
        stops = playing.request.sampling.stop_token_ids
        return frame.around(token_ids, ended=at > 0 and int(playing.known.token_ids[at - 1]) in stops)

    def _difference(self, playing: _ActiveEpisode, played: EpisodeState) -> str | None:
        """What is not the same where the episode was played again; None if all is."""
        for number, run in enumerate(observation_ranges(playing.known.drawn)):
            if number < len(playing.seen) and played.observations[number] in (playing.seen[number], None):
                continue
            said = played.observations[number]
            known = playing.known.token_ids[run.start : run.stop].tolist()
            if said is not None and self._read(playing, said, run.start) != known:
                return f"the environment is not deterministic: played again, observation {number} is another"
        return None

    def _end(self, playing: _ActiveEpisode, reason: str, ending: Ending, error: str | None = None) -> None:
        del self._playing[playing.name]
        episode = Episode(playing.rewards, ending)
        self._ended.append(Completion(playing.name, playing.known, reason, error, episode))

    def _fail(self, playing: _ActiveEpisode, error: str) -> None:
        self._end(playing, "failed", "failed", error)
