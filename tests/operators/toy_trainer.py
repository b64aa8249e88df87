"""A trainer that only counts batches."""

from __future__ import annotations

from in_memory_log import Log
from record_factories import manifest
from scripted_engine import ScriptedWeights

from operators.io.validation import invalid_reason
from schemas.records import PolicyVersion
from schemas.topics import BATCHES, RELAY


class ToyTrainer:
    """Counts batches instead of training. Restarts from its last checkpoint under the next epoch, as the real one."""

    def __init__(self, log: Log, weights: ScriptedWeights, shards: int = 1, every: int = 3) -> None:
        self._log, self._weights, self._shards, self._every = log, weights, shards, every
        self._checkpoint: tuple[PolicyVersion | None, int, int] = (None, 0, 0)
        self._epoch = 0
        self.start()

    def start(self) -> None:
        self._epoch += 1
        self._parent, self._number, self._next = self._checkpoint
        self._unpublished: list[int] = []
        manifests = (version for version in self._log.rows(RELAY) if invalid_reason(version) is None)
        earlier_versions = [version for version in manifests if version.version.epoch != self._epoch]
        self._published = max([-1, *(batch for version in earlier_versions for batch in version.batches)])
        if self._number == 0 and self._published < 0:
            self._publish()

    def train(self) -> None:
        """Train the next batch, if it is complete."""
        parts = [part for part in self._log.rows(BATCHES) if part.batch == self._next]
        counts = [part.count for part in parts if part.index == 0]
        if len(counts) < self._shards:
            return
        assert len(parts) == sum(counts)
        self._unpublished.append(self._next)
        self._next += 1
        self._number += 1
        if self._unpublished[-1] >= self._published:
            self._publish()
            if self._number % self._every == 0:
                self._checkpoint = (self._parent, self._number, self._next)

    def _publish(self) -> None:
        version = PolicyVersion(self._epoch, self._number)
        self._weights.add(version)
        self._log.append(RELAY, manifest(version, tuple(self._unpublished), self._parent), str(version))
        self._parent, self._unpublished = version, []
