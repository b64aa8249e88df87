"""An emulated engine whose tokens are counted but never made, so that its cost does not grow with their number."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np

from operators.rollout.emulated_engine import EmulatedEngine
from operators.rollout.emulated_rows import EmulatedRows
from operators.rollout.engine import Completion, PartialResponse
from schemas.records import KVManifest, PolicyVersion


class CountedRows(EmulatedRows):
    """Rows whose partial responses are views of one array of zeros: the right lengths without contents."""

    def __init__(self, slots: int, context: int, *options: Any) -> None:
        super().__init__(slots, context, *options)
        self._tokens, self._logprobs = np.zeros(context, np.int32), np.zeros(context, np.float32)

    def partial(self, row: int, start: int = 0, drop: int = 0) -> PartialResponse:
        count = max(0, int(self.generated[row]) - drop - start)
        return PartialResponse(self._tokens[:count], self._logprobs[:count])


class CountedEngine(EmulatedEngine):
    """An `EmulatedEngine` over `CountedRows`."""

    _rows = CountedRows

    def _completion(self, row: int, reason: str) -> Completion:
        rows = self._scheduler.rows
        name = rows.requests[row].trajectory_id
        return Completion(name, rows.partial(row), reason, text="")  # without it the replica would decode the tokens


class CountedKVTransfers:
    """The KV of handed-over trajectories without bytes: the engine of the next owner emulates the transfer."""

    def __init__(self) -> None:
        self._nothing: Future[memoryview] = Future()
        self._nothing.set_result(memoryview(b""))

    def offer(self, version: PolicyVersion, tokens: int, data: memoryview, *, parts: bool = False) -> KVManifest:
        """The manifest of the KV of `tokens` tokens."""
        return KVManifest("predicted:1", "", version, tokens, 0, 1, ())

    def fetch(self, manifest: KVManifest) -> Future[memoryview]:
        """No bytes, at once."""
        return self._nothing
