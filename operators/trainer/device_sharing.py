"""Models that are on a device for their turns only: each is loaded, used, then offloaded to host memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch

log = logging.getLogger(__name__)

MoveToDevice = Callable[[torch.device], object]
HOST = torch.device("cpu")


class DeviceTurns:
    """Gives `models` the device in turn and measures the times. Those of `offloaded` are on the host between their
    turns, the others stay on `device`.

    The values of `models` move a model to a device.
    """

    def __init__(
        self,
        device: torch.device,
        models: Mapping[str, MoveToDevice],
        *,
        offloaded: Collection[str] = (),
    ) -> None:
        self._device, self._models = device, models
        self._offloaded = frozenset(offloaded)
        self._seconds: dict[str, float] = {}
        for name, move in models.items():
            move(HOST if name in self._offloaded else device)

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """In this context model `name` is on the device."""
        started, moves = time.perf_counter(), name in self._offloaded
        if moves:
            self._models[name](self._device)
            started = self._record(name, "load", started)
        try:
            yield
        finally:
            started = self._record(name, "use", started)
            if moves:
                self._models[name](HOST)
                self._record(name, "offload", started)

    def seconds(self) -> dict[str, float]:
        """`time/<model>_<load|use|offload>` since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _record(self, name: str, phase: str, started: float) -> float:
        now = time.perf_counter()
        key = f"time/{name}_{phase}"
        self._seconds[key] = self._seconds.get(key, 0.0) + now - started
        log.debug("%s: %s took %.3f s", name, phase, now - started)
        return now
