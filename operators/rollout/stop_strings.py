"""Stop strings, on engines that know of tokens alone: a request ends with the token that completes one of its strings.

`StoppingEngine` is an engine around any engine. Strings are looked for in the text of a request's last turn, which is
all of its response where no environment takes part. A string may begin in one token and end in another.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from operators.rollout.engine import KV, Completion, Engine, EngineStatus, PartialResponse, Request
from operators.rollout.request_checks import check_loadable
from operators.rollout.turns import last_turn
from schemas.records import PolicyVersion

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class StopMatcher:
    """`strings` that end a turn, found in the text of its tokens."""

    def __init__(self, strings: tuple[str, ...], decode: Callable[[list[int]], str]) -> None:
        self.strings, self._decode = strings, decode
        self._last = {string[-1] for string in strings} | {_REPLACEMENT}  # half a letter may be the end of one
        self._ends: dict[int, bool] = {}

    def may_end(self, token_ids: np.ndarray) -> bool:
        """Whether one of `token_ids` has what a string ends with: a quick look, at single tokens."""
        return any(map(self._has_end, token_ids.tolist()))

    def end(self, token_ids: np.ndarray) -> int | None:
        """How many of `token_ids`, a turn's, it takes until a string is there; None if none is."""
        turn: list[int] = token_ids.tolist()
        if not self._there(turn):
            return None
        return 1 + bisect.bisect_left(range(1, len(turn)), True, key=lambda count: self._there(turn[:count]))

    def _there(self, token_ids: list[int]) -> bool:
        text = self._decode(token_ids) if self.strings else ""
        return any(string in text for string in self.strings)

    def _has_end(self, token_id: int) -> bool:
        known = self._ends.get(token_id)
        if known is None:
            known = self._ends[token_id] = not self._last.isdisjoint(self._decode([token_id]))
        return known


@dataclass(slots=True)
class _WatchedRequest:
    """A request with stop strings, whose last turn begins at token `take_started`; `looked` tokens were looked at."""

    request: Request
    stops: StopMatcher
    begun: int
    looked: int

    def cut(self, generated: PartialResponse) -> PartialResponse | None:
        """`generated` up to the end of the first stop string, its KV too; None where none is in it."""
        end = self.stops.end(generated.token_ids[self.begun :])
        if end is None:
            return None
        keep, mask, kv = self.begun + end, generated.loss_mask, generated.kv
        if kv is not None:
            kv = KV(min(kv.tokens, len(self.request.prompt) + keep), kv.data, kv.layout_tokens or kv.tokens)
        mask = None if mask is None else mask[:keep]
        return PartialResponse(generated.token_ids[:keep], generated.logprobs[:keep], kv, mask)


class StoppingEngine:
    """`engine`, with stop strings; `decode` is the tokenizer's. Requests without any pass through."""

    def __init__(self, engine: Engine, decode: Callable[[list[int]], str]) -> None:
        self._engine, self._decode = engine, decode
        self._stops: dict[tuple[str, ...], StopMatcher] = {}
        self._watched: dict[str, _WatchedRequest] = {}
        self._ended: list[Completion] = []

    @property
    def version(self) -> PolicyVersion | None:
        """The weight version loaded, None before the first."""
        return self._engine.version

    def load(self, weights: Path, version: PolicyVersion) -> None:
        """As the engine's."""
        check_loadable(self.status(), version)
        self._engine.load(weights, version)

    def submit(self, request: Request) -> None:
        """As the engine's; a partial in which a string has come about completes in the next step."""
        name, strings = request.trajectory_id, request.sampling.stop_strings
        if any(name == ended.trajectory_id for ended in self._ended):
            raise ValueError(f"trajectory {name!r} is here already")
        self._engine.submit(request)
        if not strings:
            return
        known = request.partial
        count = 0 if known is None else len(known.token_ids)
        turn = None if known is None else last_turn(known.drawn)
        stops = self._stops.setdefault(strings, StopMatcher(strings, self._decode))
        watched = _WatchedRequest(request, stops, count if turn is None else turn.start, count)
        stopped = None if known is None else watched.cut(known)
        if stopped is None:
            self._watched[name] = watched
        else:
            self._engine.release([name])
            self._ended.append(Completion(name, stopped, "stop"))

    def step(self) -> Sequence[Completion]:
        """One round of the engine, and what has come to a stop string by it."""
        ended, self._ended = self._ended, []
        ended += [self._stopped(completion) for completion in self._engine.step()]
        looked = {name: watched.looked for name, watched in self._watched.items()}
        stopping = []
        for name, new in self._engine.generated(looked).items() if looked else ():
            watched = self._watched[name]
            watched.looked += len(new.token_ids)
            if watched.stops.may_end(new.token_ids):
                stopping.append(name)
        for name, generated in self._engine.generated(dict.fromkeys(stopping, 0)).items() if stopping else ():
            watched = self._watched[name]
            if watched.cut(generated) is not None:
                released = self._engine.release([name], with_kv=watched.request.keep_kv)[name]
                ended.append(self._stopped(Completion(name, released, "stop")))
        return ended

    def take_started(self) -> Sequence[str]:
        """As the engine's."""
        return self._engine.take_started()

    def due(self) -> float:
        """As the engine's."""
        return 0.0 if self._ended else self._engine.due()

    def release(self, trajectory_ids: Collection[str], *, with_kv: bool = False) -> dict[str, PartialResponse]:
        """As the engine's."""
        released = self._engine.release(trajectory_ids, with_kv=with_kv)
        for name in trajectory_ids:
            self._watched.pop(name, None)
        released |= {each.trajectory_id: each.generated for each in self._ended if each.trajectory_id in trajectory_ids}
        self._ended = [each for each in self._ended if each.trajectory_id not in trajectory_ids]
        return released

    def generated(self, since: Mapping[str, int]) -> dict[str, PartialResponse]:
        """As the engine's."""
        return self._engine.generated(since)

    def status(self) -> EngineStatus:
        """As the engine's."""
        status = self._engine.status()
        return replace(status, waiting=status.waiting + len(self._ended)) if self._ended else status

    def close(self) -> None:
        """As the engine's."""
        self._engine.close()

    def _stopped(self, completion: Completion) -> Completion:
        """`completion`, without what the engine made beyond a stop string: it may make many tokens a step."""
        watched = self._watched.pop(completion.trajectory_id, None)
        if watched is None or completion.finish_reason == "failed":
            return completion
        cut = watched.cut(completion.generated)
        return completion if cut is None else replace(completion, generated=cut, finish_reason="stop")
