"""What an environment is, and one episode of it as a worker process plays it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from infra.name_lookup import import_user_module


class Environment(Protocol):
    """One episode; made anew for each, with the options of the configuration.

    Deterministic given the prompt and the texts: an episode that goes on elsewhere is played again from them, and one
    that then observes something else fails. A class may have `stop`, strings that end a turn beside the end of
    sequence; `starts_processes = True` if its steps start programs; `keeps_threads = True` if threads of its own go on
    between them; `close()`, called when nobody goes on with the episode; `independent = True` if a step depends on the
    prompt and its own text alone, and earns nothing unless it is the last: turns before are then never played again.
    """

    def reset(self, prompt: Mapping[str, Any]) -> str:
        """What is observed before the first turn, often nothing. `prompt` has text, task, number and reference."""

    def step(self, text: str) -> tuple[str, float, bool, Mapping[str, Any]]:
        """What the model's turn `text` leads to: observation, reward, whether the episode is done, and more for people.

        An episode that goes on must observe something; what a last step observes nobody reads.
        """


class EpisodeState(NamedTuple):
    """An episode so far: the observation of the reset and of each turn (None where that was not played again), each
    turn's reward, whether it is done."""

    observations: list[str | None]
    rewards: list[float]
    done: bool


class EnvironmentKind(NamedTuple):
    """A class of environments, with its options."""

    make: Callable[[], Any]
    stop: tuple[str, ...]
    starts_processes: bool
    keeps_threads: bool
    independent: bool


def load_environment(target: str, options: Mapping[str, Any]) -> EnvironmentKind:
    """Class `target`, "module:Class". Imports its module, so only ever in a worker process.

    Raises ValueError if it is no environment, and what its module and its constructor raise.
    """
    module_name, _, class_name = target.rpartition(":")
    kind = getattr(import_user_module(module_name), class_name, None)
    if not inspect.isclass(kind):
        raise ValueError(f"{module_name} has no class {class_name!r}")
    for method in ("reset", "step"):
        if not callable(getattr(kind, method, None)):
            raise ValueError(f"{target} has no method {method!r}")
    stop = getattr(kind, "stop", ())
    if isinstance(stop, str) or not all(isinstance(each, str) and each for each in stop):
        raise ValueError(f"{target}: stop must be strings that are not empty, not {stop!r}")
    _close(kind(**options))  # options that do not fit are told now
    flags = (bool(getattr(kind, name, False)) for name in ("starts_processes", "keeps_threads", "independent"))
    return EnvironmentKind(lambda: kind(**options), tuple(stop), *flags)


class LiveEpisode:
    """An episode of `kind` that can go on from where it is. `most` is the longest observation, in letters."""

    def __init__(self, kind: EnvironmentKind, prompt: Mapping[str, Any], most: int) -> None:
        self._kind, self._most = kind, most
        self._environment = kind.make()
        self.texts: list[str] = []
        self.state = EpisodeState([self._observed(self._environment.reset(dict(prompt)))], [], False)

    def is_prefix_of(self, texts: Sequence[str]) -> bool:
        """Whether it has come about by the first of `texts`, or all of them."""
        return self.texts == list(texts[: len(self.texts)])

    def take_remaining(self, texts: Sequence[str]) -> Sequence[str]:
        """Those of `texts` that are still to be played."""
        if self._kind.independent and (passed := texts[len(self.texts) : -1]):
            self.texts += passed
            observations, rewards, done = self.state
            self.state = EpisodeState([*observations, *[None] * len(passed)], [*rewards, *[0.0] * len(passed)], done)
        return texts[len(self.texts) :]

    def step(self, text: str) -> None:
        """Play one more turn. Raises what the environment raises, TypeError for what it must not return, ValueError for
        a reward that is not finite, too long an observation, and a turn after the end."""
        if self.state.done:
            raise ValueError(f"it is done after {len(self.texts)} turns, and was not when they were played first")
        returned = self._environment.step(text)
        if not isinstance(returned, tuple) or len(returned) != 4:
            raise TypeError(f"step must return observation, reward, done and info, not {type(returned).__name__}")
        observation, reward, done, info = returned
        if not isinstance(done, bool) or not isinstance(info, Mapping):
            raise TypeError(f"done must be a bool and info a mapping, not {type(done).__name__}, {type(info).__name__}")
        if self._kind.independent and reward and not done:
            raise ValueError(f"a step that is independent earns nothing unless it is the last, not {reward}")
        observations = [*self.state.observations, self._observed(observation)]
        self.state = EpisodeState(observations, [*self.state.rewards, _checked_reward(reward)], done)
        self.texts.append(text)

    def close(self) -> None:
        """Nobody goes on with it."""
        _close(self._environment)

    def _observed(self, observation: Any) -> str:
        if not isinstance(observation, str):
            raise TypeError(f"an observation must be text, not {type(observation).__name__}")
        if len(observation) > self._most:
            raise ValueError(f"an observation of {len(observation)} letters is longer than {self._most}")
        observation.encode()  # raises ValueError for half of a surrogate pair
        return observation


def _close(environment: Any) -> None:
    close = getattr(environment, "close", None)
    if callable(close):
        close()


def _checked_reward(reward: Any) -> float:
    if not isinstance(reward, int | float):
        raise TypeError(f"a reward must be a number, not {type(reward).__name__}")
    if not math.isfinite(reward):
        raise ValueError(f"a reward must be finite, not {reward}")
    return float(reward)
