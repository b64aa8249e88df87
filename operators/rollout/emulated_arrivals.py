"""Requests whose KV is still on its way to an emulated engine: it comes beside the rounds, a trajectory at a time."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Mapping

from operators.rollout.engine import PartialResponse, Request


class Arrivals:
    """They come over one link in the order in which they were handed over, `token_s` emulated seconds a token.

    Each goes on once its own KV is here, whatever is still to come behind it.
    """

    def __init__(self, token_s: float) -> None:
        self._token_s = token_s
        self._here_at: OrderedDict[str, tuple[float, Request]] = OrderedDict()
        self._link_free_at = -math.inf

    def __len__(self) -> int:
        return len(self._here_at)

    def __contains__(self, trajectory_id: object) -> bool:
        return trajectory_id in self._here_at

    @property
    def next_at(self) -> float:
        """When the next one is here; infinite where nothing is to come."""
        return next(iter(self._here_at.values()))[0] if self._here_at else math.inf

    def add(self, request: Request, tokens: int, now: float) -> None:
        """The KV of `tokens` tokens of `request` is to come."""
        self._link_free_at = max(self._link_free_at, now) + tokens * self._token_s
        self._here_at[request.trajectory_id] = self._link_free_at, request

    def take(self, now: float) -> list[Request]:
        """What is here by now."""
        here = []
        while self.next_at <= now:
            here.append(self._here_at.popitem(last=False)[1][1])
        return here

    def release(self, trajectory_ids: Collection[str]) -> dict[str, PartialResponse]:
        """Wait for these no more; what each had when it was handed over."""
        wanted = self._here_at.keys() & set(trajectory_ids)
        return {name: _partial(self._here_at.pop(name)[1]) for name in wanted}

    def generated(self, since: Mapping[str, int]) -> dict[str, PartialResponse]:
        """What these had when they were handed over, from the position that `since` gives on."""
        wanted = self._here_at.keys() & since.keys()
        return {name: _partial(self._here_at[name][1]).since(since[name]) for name in wanted}


def _partial(request: Request) -> PartialResponse:
    assert request.partial is not None  # nothing else has KV
    return request.partial
