"""Which episodes agents elsewhere have claimed. A claim ends with its episode, or after a time.

Claims are only here: a gateway that starts hands out episodes without requests again. Two agents may then play one
episode; the first that ends it decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from operators.gateway.episode_table import EpisodeTable, OpenEpisode
from operators.io.agent_tasks import task_of


class HandedOut(NamedTuple):
    """An episode for an agent: the number of the attempt, and the task."""

    episode: str
    attempt: int
    task: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Claim:
    """Attempt number `attempt` after `failures` failed ones, until `expires` (of the clock); None: it has ended."""

    attempt: int
    failures: int
    expires: float | None


_UNCLAIMED = Claim(-1, 0, None)


class OtherProcess(LookupError):
    """Another process of the gateway hands out the episode."""


class Claims:
    """Hands out the episodes in `table` of process `index` of `processes`.

    An agent has `timeout_s` seconds; after `retries` more attempts the episode fails. `clock` is monotonic seconds.
    """

    def __init__(
        self,
        table: EpisodeTable,
        index: int,
        processes: int,
        timeout_s: float,
        retries: int,
        clock: Callable[[], float],
    ) -> None:
        self.timeout_s = timeout_s
        self._table, self._index, self._processes = table, index, processes
        self._retries, self._clock = retries, clock
        self._claims: dict[str, Claim] = {}
        self._started = clock()

    def claim(self) -> HandedOut | None:
        """An episode for an agent, the oldest first; None if there is none now."""
        expires = self._clock() + self.timeout_s
        with self._table.locked():
            for name, episode, claim in self._open():
                if claim.expires is None and claim.failures <= self._retries:
                    self._claims[name] = Claim(claim.attempt + 1, claim.failures, expires)
                    return HandedOut(name, claim.attempt + 1, task_of(episode.prompt, episode.member))
        return None

    def failed(self) -> list[str]:
        """Episodes whose last attempt has failed."""
        with self._table.locked():
            return [name for name, _, claim in self._open() if claim.expires is None and claim.failures > self._retries]

    def give_back(self, name: str, attempt: int, *, failed: bool) -> bool:
        """End attempt number `attempt` at `name` early; returns whether another one may follow.

        An attempt that has expired is not counted again. Raises OtherProcess.
        """
        with self._table.locked():
            episode = self._table.get(name)
            if episode is None:
                return not self._table.has_finished(name)
            if not self._is_own(episode):
                raise OtherProcess(name)
            claim = self._current(name, episode)
            if claim.expires is not None and attempt >= claim.attempt:
                claim = self._claims[name] = Claim(attempt, claim.failures + failed, None)
            return claim.failures <= self._retries

    def _open(self) -> Iterator[tuple[str, OpenEpisode, Claim]]:
        """Yield the episodes of this process with their claims; claims of episodes that have ended are forgotten."""
        names = self._table.names()
        self._claims = {name: self._claims[name] for name in names if name in self._claims}
        for name in names:
            episode = self._table.get(name)
            if episode is not None and self._is_own(episode):
                yield name, episode, self._current(name, episode)

    def _is_own(self, episode: OpenEpisode) -> bool:
        return episode.prompt.number % self._processes == self._index

    def _current(self, name: str, episode: OpenEpisode) -> Claim:
        """The claim of an episode; one with turns that nobody has claimed is played since before this process."""
        claim = self._claims.get(name)
        if claim is None:
            claim = Claim(0, 0, self._started + self.timeout_s) if episode.turns else _UNCLAIMED
        if claim.expires is not None and self._clock() >= claim.expires:
            claim = Claim(claim.attempt, claim.failures + 1, None)
        return claim
