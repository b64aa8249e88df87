"""Models that share a device in turns: each is loaded, used, and put back into the host's memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

log = logging.getLogger(__name__)

Move = Callable[[torch.device], object]
HOST = torch.device("cpu")


class DeviceTurns:
    """Who has `device` when, and for how long. `models` move themselves; where they do not `share`, all stay there."""

    def __init__(
        self,
        device: torch.device,
        models: Mapping[str, Move],
        *,
        share: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._device, self._models, self._clock = device, models, clock
        self._share = share and len(models) > 1
        self._seconds: dict[str, float] = {}
        for move in models.values():
            move(HOST if self._share else device)

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Model `name` is on the device, and no other one that shares it."""
        began = self._clock()
        if self._share:
            self._models[name](self._device)
            began = self._told(name, "load", began)
        try:
            yield
        finally:
            began = self._told(name, "use", began)
            if self._share:
                self._models[name](HOST)
                self._told(name, "offload", began)

    def seconds(self) -> dict[str, float]:
        """`time/<model>_<load|use|offload>` since the last call."""
        told, self._seconds = self._seconds, {}
        return told

    def _told(self, name: str, what: str, began: float) -> float:
        now = self._clock()
        key = f"time/{name}_{what}"
        self._seconds[key] = self._seconds.get(key, 0.0) + now - began
        log.debug("%s: %s took %.3f s", name, what, now - began)
        return now
