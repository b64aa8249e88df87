"""Which episodes agents elsewhere have claimed. A claim ends with its episode, or after a time.

Claims are only here: a gateway that starts hands out episodes without requests again. Two agents may then play one
episode; the first that ends it decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.responses import Response as HttpResponse

from infra.kafka.producer import DeliveryFailed
from operators.gateway.episode_table import EpisodeTable, OpenEpisode
from operators.gateway.errors import ApiError, invalid
from operators.gateway.play import Player
from operators.gateway.reports import AgentReport, text_in
from operators.io.agent_tasks import task_of
from operators.io.episode_keys import ATTEMPT, EpisodeKeys
from schemas.identity import is_trajectory_id

log = logging.getLogger(__name__)

MAX_CLAIM_WAIT_S = 60.0
_CLAIM_CHECK_S = 0.1
_NOT_IN_TIME = "no agent finished it in time"
_CLOSE = {"connection": "close"}
"""Each process hands out other episodes: the next claim must be able to reach another one."""


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


@dataclass
class ClaimRequests:
    """Answers the requests of programs elsewhere, with keys of `keys`."""

    claims: Claims
    player: Player
    keys: EpisodeKeys
    ending: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Episodes that are ended because their last attempt has failed."""
    claiming: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def claim(self, request: Request, body: Any) -> HttpResponse:
        """An episode for an agent, with its key and task; status 204 if there is none within `wait_s`."""
        claims = self.claims
        wait = body.get("wait_s", 0) if isinstance(body, dict) else None
        if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait <= MAX_CLAIM_WAIT_S:
            raise invalid(f"wait_s must be from 0 to {MAX_CLAIM_WAIT_S:g} seconds", "wait_s")
        for expired in claims.failed():
            if expired not in self.ending:
                self.ending[expired] = asyncio.create_task(self._fail(expired))
        found = await self._next(wait)
        if found is not None and await request.is_disconnected():
            claims.give_back(found.episode, found.attempt, failed=False)
            found = None
        if found is None:
            return HttpResponse(status_code=204, headers=_CLOSE)
        key = f"{self.keys.key_of(found.episode)}{ATTEMPT}{found.attempt}"
        limits = {"timeout_s": claims.timeout_s, "turn_timeout_s": self.player.timeout_s}
        return JSONResponse({**found._asdict(), "key": key, **limits}, headers=_CLOSE)

    async def _fail(self, name: str) -> None:
        """End an episode that no agent finished in time; no claim waits for its owner."""
        try:
            await self.player.end(name, AgentReport(error=_NOT_IN_TIME))
        except (ApiError, DeliveryFailed, TimeoutError) as error:
            log.warning("episode %s could not be ended, the next claim tries it again: %s", name, error)
        finally:
            del self.ending[name]

    async def _next(self, wait: float) -> HandedOut | None:
        """The next episode for an agent; None if there is none within `wait` seconds."""
        try:
            async with asyncio.timeout(wait), self.claiming:  # one request at a time looks for an episode
                while (found := self.claims.claim()) is None:
                    await asyncio.sleep(_CLAIM_CHECK_S)
                return found
        except TimeoutError:
            return None

    async def release(self, body: Any) -> HttpResponse:
        """Give back an episode: another attempt follows, or the episode ends with the error of its agent, if any."""
        episode, attempt, error = _given_back(body)
        try:
            again = self.claims.give_back(episode, attempt, failed=error is not None)
        except OtherProcess as other:
            elsewhere = f"another process of the gateway hands out {episode}; repeat the request"
            raise ApiError(503, elsewhere, "server_error") from other
        if not again:
            await self.player.end(episode, AgentReport(error=error or _NOT_IN_TIME))
        return JSONResponse({"episode": episode, "again": again})


def _given_back(body: Any) -> tuple[str, int, str | None]:
    """Episode, number of the attempt, and error of a request that gives an episode back. Raises ApiError."""
    given = body if isinstance(body, dict) else {}
    episode, attempt, error = text_in(given, "episode"), given.get("attempt"), text_in(given, "error")
    if episode is None or not is_trajectory_id(episode):
        raise invalid("episode must be the id of one", "episode")
    if isinstance(attempt, bool) or not isinstance(attempt, int) or attempt < 0:
        raise invalid("attempt must be the number that the claim returned", "attempt")
    return episode, attempt, error
