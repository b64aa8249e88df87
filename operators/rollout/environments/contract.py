"""The interface of an environment, and an episode of it in a worker process."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from infra.name_lookup import member_of
from schemas.scalars import LARGEST_REWARD


class Environment(Protocol):
    """One episode; a new instance for each, with the options of the configuration.

    It must be deterministic given the prompt and the texts: an episode that continues in another process is replayed
    from them, and fails if an observation differs. A class may define:
    - `stop`: strings that end a turn, besides the end of sequence;
    - `starts_processes = True`, if its steps start programs;
    - `keeps_threads = True`, if it has threads that run between steps;
    - `close()`, called when the episode does not continue in this process;
    - `independent = True`, if a step depends only on the prompt and its own text, and only the last step has a reward:
      earlier turns are then never replayed.
    """

    def reset(self, prompt: Mapping[str, Any]) -> str:
        """The observation before the first turn, often empty. `prompt` has text, task, number and reference."""

    def step(self, text: str) -> tuple[str, float, bool, Mapping[str, Any]]:
        """Process the model's turn `text`; returns observation, reward, done and info.

        The observation must not be empty unless the episode is done; then it is ignored.
        """


class EpisodeState(NamedTuple):
    """An episode so far: the observations of the reset and of each turn (None for a turn that was not replayed), the
    reward of each turn, and whether it is done."""

    observations: list[str | None]
    rewards: list[float]
    done: bool


class EnvironmentKind(NamedTuple):
    """An environment class with its options."""

    make: Callable[[], Any]
    stop: tuple[str, ...]
    starts_processes: bool
    keeps_threads: bool
    independent: bool


def load_environment(target: str, options: Mapping[str, Any]) -> EnvironmentKind:
    """Load class `target`, "module:Class". Imports its module, so it must only be called in a worker process.

    Raises ValueError if it is not an environment, and what its module and its constructor raise.
    """
    module_name, _, class_name = target.rpartition(":")
    kind = member_of(module_name, class_name, "class", inspect.isclass)
    for method in ("reset", "step"):
        if not callable(getattr(kind, method, None)):
            raise ValueError(f"{target} has no method {method!r}")
    stop = getattr(kind, "stop", ())
    if isinstance(stop, str) or not all(isinstance(each, str) and each for each in stop):
        raise ValueError(f"{target}: stop must be non-empty strings, not {stop!r}")
    _close(kind(**options))  # reports invalid options now
    flags = (bool(getattr(kind, name, False)) for name in ("starts_processes", "keeps_threads", "independent"))
    return EnvironmentKind(lambda: kind(**options), tuple(stop), *flags)


class LiveEpisode:
    """An episode of `kind` that can continue. `max_chars` bounds the length of an observation."""

    def __init__(self, kind: EnvironmentKind, prompt: Mapping[str, Any], max_chars: int) -> None:
        self._kind, self._max_chars = kind, max_chars
        self._environment = kind.make()
        self.texts: list[str] = []
        reset = self._environment.reset
        self.state = EpisodeState([self._observed(reset(dict(prompt)), reset)], [], False)

    def is_prefix_of(self, texts: Sequence[str]) -> bool:
        """Whether its turns are the first ones of `texts`."""
        return self.texts == list(texts[: len(self.texts)])

    def take_remaining(self, texts: Sequence[str]) -> Sequence[str]:
        """The turns of `texts` that are still to run; skips earlier turns of an independent environment."""
        if self._kind.independent and (skipped := texts[len(self.texts) : -1]):
            self.texts += skipped
            observations, rewards, done = self.state
            self.state = EpisodeState([*observations, *[None] * len(skipped)], [*rewards, *[0.0] * len(skipped)], done)
        return texts[len(self.texts) :]

    def step(self, text: str) -> None:
        """Run one turn. Raises what the environment raises, TypeError for an invalid return value, ValueError for a
        reward that is not finite, an observation that is too long, and a turn after the end."""
        if self.state.done:
            raise ValueError(f"on replay the episode is done after {len(self.texts)} turns, but was not before")
        step = self._environment.step
        returned = step(text)
        if not isinstance(returned, tuple) or len(returned) != 4:
            what = f"{len(returned)} values" if isinstance(returned, tuple) else type(returned).__name__
            raise TypeError(f"step must return 4 values (observation, reward, done, info), not {what}{_place(step)}")
        observation, reward, done, info = returned
        if not isinstance(done, bool) or not isinstance(info, Mapping):
            kinds = f"{type(done).__name__}, {type(info).__name__}"
            raise TypeError(f"done must be a bool and info a mapping, not {kinds}{_place(step)}")
        if self._kind.independent and reward and not done:
            raise ValueError(f"only the last step of an independent environment may have a reward, not {reward}")
        observations = [*self.state.observations, self._observed(observation, step)]
        self.state = EpisodeState(observations, [*self.state.rewards, _checked_reward(reward, step)], done)
        self.texts.append(text)

    def close(self) -> None:
        """Close the environment; the episode does not continue here."""
        _close(self._environment)

    def _observed(self, observation: Any, method: Callable[..., Any]) -> str:
        if not isinstance(observation, str):
            raise TypeError(f"an observation must be text, not {type(observation).__name__}{_place(method)}")
        if len(observation) > self._max_chars:
            raise ValueError(
                f"an observation of {len(observation)} characters exceeds {self._max_chars}{_place(method)}"
            )
        observation.encode()  # raises ValueError for an unpaired surrogate
        return observation


def _close(environment: Any) -> None:
    close = getattr(environment, "close", None)
    if callable(close):
        close()


def _checked_reward(reward: Any, step: Callable[..., Any]) -> float:
    if not isinstance(reward, int | float):
        raise TypeError(f"a reward must be a number, not {type(reward).__name__}{_place(step)}")
    if not abs(reward) <= LARGEST_REWARD:
        raise ValueError(f"a reward must be finite, at most {LARGEST_REWARD:g}, not {reward}{_place(step)}")
    return float(reward)


def _place(method: Callable[..., Any]) -> str:
    """The file and line of a user's method that returned a wrong value, as ` (game.py:7)`, if it is Python code."""
    code = getattr(method, "__code__", None)
    return f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code is not None else ""
