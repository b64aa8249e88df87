"""Emulated KV transfers: requests whose KV is still being transferred to an emulated engine."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Mapping

from operators.rollout.engine import PartialResponse, Request


class Arrivals:
    """Transfers over one link, in submission order, of `token_s` emulated seconds per token.

    Transfers overlap with the engine's rounds. Each request continues once its own KV has arrived.
    """

    def __init__(self, token_s: float) -> None:
        self._token_s = token_s
        self._arrivals: OrderedDict[str, tuple[float, Request]] = OrderedDict()
        self._link_free_at = -math.inf

    def __len__(self) -> int:
        return len(self._arrivals)

    def __contains__(self, trajectory_id: object) -> bool:
        return trajectory_id in self._arrivals

    @property
    def next_at(self) -> float:
        """When the next request arrives; infinite if none is in transfer."""
        return next(iter(self._arrivals.values()))[0] if self._arrivals else math.inf

    def add(self, request: Request, tokens: int, now: float) -> None:
        """Start the transfer of `tokens` KV tokens of `request`."""
        self._link_free_at = max(self._link_free_at, now) + tokens * self._token_s
        self._arrivals[request.trajectory_id] = self._link_free_at, request

    def take(self, now: float) -> list[Request]:
        """The requests that have arrived by `now`."""
        arrived = []
        while self.next_at <= now:
            arrived.append(self._arrivals.popitem(last=False)[1][1])
        return arrived

    def release(self, trajectory_ids: Collection[str]) -> dict[str, PartialResponse]:
        """Cancel the transfers of these requests; returns their partial responses."""
        wanted = self._arrivals.keys() & set(trajectory_ids)
        return {name: _partial(self._arrivals.pop(name)[1]) for name in wanted}

    def generated(self, since: Mapping[str, int]) -> dict[str, PartialResponse]:
        """The tokens of these requests from position `since[id]` on."""
        wanted = self._arrivals.keys() & since.keys()
        return {name: _partial(self._arrivals[name][1]).since(since[name]) for name in wanted}


def _partial(request: Request) -> PartialResponse:
    assert request.partial is not None  # only partial responses have KV
    return request.partial
