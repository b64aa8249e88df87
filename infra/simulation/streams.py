"""Random streams by name: what one component draws changes no draw of another, and no choice between other names."""

from __future__ import annotations

import random
from collections.abc import Mapping


class Streams:
    """A stream of random numbers for each name, derived from `seed` and the name alone."""

    def __init__(self, seed: object) -> None:
        self._seed = seed
        self._streams: dict[tuple[str, ...], random.Random] = {}

    def of(self, *name: str) -> random.Random:
        """The stream `name`: a process and what it draws for, such as ("score", "latency of Produce")."""
        found = self._streams.get(name)
        if found is None:
            found = self._streams[name] = random.Random(f"{self._seed}/{'/'.join(name)}")
        return found

    def choose(self, purpose: str, weights: Mapping[str, float]) -> str:
        """One of the names in `weights`, with a probability proportional to its weight.

        Each name draws for itself, so a new name changes only the choices that it wins (weighted rendezvous hashing).
        """
        return min(weights, key=lambda name: self.of(purpose, name).expovariate(weights[name]))
