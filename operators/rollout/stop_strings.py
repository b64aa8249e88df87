"""Stop strings for engines that handle only tokens: a request ends with the token that completes a stop string.

`StoppingEngine` wraps any engine. It searches the text of a request's last turn, which is its whole response without an
environment. A stop string may span several tokens.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from operators.rollout.engine import Completion, Engine, EngineStatus, PartialResponse, Request
from operators.rollout.turns import last_turn
from operators.rollout.wrapped_engine import WrappedEngine

MAX_MATCHERS = 16
"""Matchers kept for the strings of later requests; each remembers all tokens that it has seen."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class StopMatcher:
    """Finds the stop `strings` of a turn in the text of its tokens."""

    def __init__(self, strings: tuple[str, ...], decode: Callable[[list[int]], str]) -> None:
        self.strings, self._decode = strings, decode
        # The replacement character stands for an incomplete character, which may be the last of a string.
        self._last_chars = {string[-1] for string in strings} | {_REPLACEMENT}
        self._token_has_last_char: dict[int, bool] = {}

    def may_complete(self, token_ids: np.ndarray) -> bool:
        """Whether one of `token_ids` contains the last character of a string: a fast check of single tokens."""
        return any(map(self._has_last_char, token_ids.tolist()))

    def end(self, token_ids: np.ndarray) -> int | None:
        """The number of a turn's `token_ids` up to the end of the first stop string; None if there is none."""
        turn: list[int] = token_ids.tolist()
        if not self._contains_stop(turn):
            return None
        return 1 + bisect.bisect_left(range(1, len(turn)), True, key=lambda count: self._contains_stop(turn[:count]))

    def _contains_stop(self, token_ids: list[int]) -> bool:
        text = self._decode(token_ids) if self.strings else ""
        return any(string in text for string in self.strings)

    def _has_last_char(self, token_id: int) -> bool:
        known = self._token_has_last_char.get(token_id)
        if known is None:
            text = self._decode([token_id, token_id])  # twice, because some tokenizers drop the first token's space
            known = self._token_has_last_char[token_id] = not self._last_chars.isdisjoint(text)
        return known


@dataclass(slots=True)
class _WatchedRequest:
    """A request with stop strings; its last turn starts at token `turn_start`, and `checked` tokens were checked."""

    request: Request
    matcher: StopMatcher
    turn_start: int
    checked: int

    def cut(self, generated: PartialResponse) -> PartialResponse | None:
        """`generated`, with its KV, up to the end of the first stop string; None if it has none."""
        end = self.matcher.end(generated.token_ids[self.turn_start :])
        if end is None:
            return None
        keep, mask, kv = self.turn_start + end, generated.loss_mask, generated.kv
        if kv is not None:
            tokens = min(kv.tokens, len(self.request.prompt) + keep)
            kv = replace(kv, tokens=tokens, layout_tokens=kv.layout_tokens or kv.tokens)
        mask = None if mask is None else mask[:keep]
        return PartialResponse(generated.token_ids[:keep], generated.logprobs[:keep], kv, mask)


class StoppingEngine(WrappedEngine):
    """`engine` with stop strings; `decode` is the tokenizer's. Requests without stop strings pass through."""

    def __init__(self, engine: Engine, decode: Callable[[list[int]], str]) -> None:
        super().__init__(engine)
        self._decode = decode
        self._matchers: dict[tuple[str, ...], StopMatcher] = {}
        self._watched: dict[str, _WatchedRequest] = {}

    def submit(self, request: Request) -> None:
        """As the engine's; a partial response with a stop string completes in the next step."""
        name, strings = request.trajectory_id, request.sampling.stop_strings
        if any(name == ended.trajectory_id for ended in self._ended):
            raise ValueError(f"trajectory {name!r} is already in the engine")
        self._engine.submit(request)
        if not strings:
            return
        known = request.partial
        count = 0 if known is None else len(known.token_ids)
        turn = None if known is None else last_turn(known.drawn)
        watched = _WatchedRequest(request, self._matcher(strings), count if turn is None else turn.start, count)
        stopped = None if known is None else watched.cut(known)
        if stopped is None:
            self._watched[name] = watched
        else:
            self._engine.release([name])
            self._ended.append(Completion(name, stopped, "stop"))

    def step(self) -> Sequence[Completion]:
        """One round of the engine; also returns the requests that reached a stop string in it."""
        ended = self._take_ended()
        ended += [self._cut_completion(completion) for completion in self._engine.step()]
        checked = {name: watched.checked for name, watched in self._watched.items()}
        stopping = []
        for name, new in self._engine.generated(checked).items() if checked else ():
            watched = self._watched[name]
            watched.checked += len(new.token_ids)
            if watched.matcher.may_complete(new.token_ids):
                stopping.append(name)
        for name, generated in self._engine.generated(dict.fromkeys(stopping, 0)).items() if stopping else ():
            watched = self._watched[name]
            if watched.cut(generated) is not None:
                released = self._engine.release([name], with_kv=watched.request.keep_kv)[name]
                ended.append(self._cut_completion(Completion(name, released, "stop")))
        return ended

    def due(self) -> float:
        """As the engine's."""
        return 0.0 if self._ended else self._engine.due()

    def release(self, trajectory_ids: Collection[str], *, with_kv: bool = False) -> dict[str, PartialResponse]:
        """As the engine's."""
        released = self._engine.release(trajectory_ids, with_kv=with_kv)
        for name in trajectory_ids:
            self._watched.pop(name, None)
        return released | self._release_ended(trajectory_ids)

    def generated(self, since: Mapping[str, int]) -> dict[str, PartialResponse]:
        """As the engine's."""
        return self._engine.generated(since)

    def status(self) -> EngineStatus:
        """As the engine's."""
        status = self._engine.status()
        return replace(status, waiting=status.waiting + len(self._ended)) if self._ended else status

    def _matcher(self, strings: tuple[str, ...]) -> StopMatcher:
        found = self._matchers.pop(strings, None)
        matcher = self._matchers[strings] = StopMatcher(strings, self._decode) if found is None else found
        if len(self._matchers) > MAX_MATCHERS:
            del self._matchers[next(iter(self._matchers))]  # the least recently used
        return matcher

    def _cut_completion(self, completion: Completion) -> Completion:
        """`completion` cut after its stop string: the engine may generate several tokens per step."""
        watched = self._watched.pop(completion.trajectory_id, None)
        if watched is None or completion.finish_reason == "failed":
            return completion
        cut = watched.cut(completion.generated)
        return completion if cut is None else replace(completion, generated=cut, finish_reason="stop")
