"""Test doubles of the rollout: a scripted engine, weights that are evicted, and heartbeats that are not sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np

from infra.store.errors import VersionGone
from operators.rollout.engine import KV, Completion, EngineStatus, PartialResponse, Request
from schemas.records import PolicyVersion


class ScriptedEngine:
    """A request takes `steps(trajectory_id)` steps, a token each; `fails` says which come to nothing.

    A token is the number of the version that made it, or what `token` makes of that and its position. A prompt of
    `context` tokens is refused.
    """

    def __init__(
        self,
        slots: int = 4,
        steps: Callable[[str], int] = lambda name: 1,
        fails: Callable[[str], bool] = lambda name: False,
        context: int = 64,
        kv_capacity: int = 1000,
        token: Callable[[int, int], int] = lambda number, position: number,
    ) -> None:
        self._slots, self._steps, self._fails, self._context = slots, steps, fails, context
        self._kv_capacity, self._token = kv_capacity, token
        self._made: dict[str, list[int]] = {}
        self._wanted: dict[str, int] = {}
        self._fresh: set[str] = set()
        self._started: list[str] = []
        self.version: PolicyVersion | None = None
        self.loads: list[PolicyVersion] = []
        self.given: dict[str, bytes] = {}
        """The KV with which requests were submitted."""
        self.generated_tokens = 0
        self.closed = False

    def load(self, weights: Path, version: PolicyVersion) -> None:
        if self._made:
            raise RuntimeError(f"weights change under {sorted(self._made)}")
        self.version = version
        self.loads.append(version)

    def submit(self, request: Request) -> None:
        if len(request.prompt) >= self._context:
            raise ValueError(f"a prompt of {len(request.prompt)} tokens leaves no room")
        if request.trajectory_id in self._made:
            raise ValueError(f"{request.trajectory_id} is already in the engine")
        known = [] if request.partial is None else request.partial.token_ids.tolist()
        self._made[request.trajectory_id] = known
        self._wanted[request.trajectory_id] = self._steps(request.trajectory_id)
        self._fresh.add(request.trajectory_id)
        if request.partial is not None and request.partial.kv is not None:
            self.given[request.trajectory_id] = bytes(request.partial.kv.data)

    def step(self) -> Sequence[Completion]:
        assert self.version is not None
        ended = []
        for name in list(self._made)[: self._slots]:
            if name in self._fresh:
                self._fresh.remove(name)
                self._started.append(name)
            if len(self._made[name]) < self._wanted[name]:
                self._made[name].append(self._token(self.version.number, len(self._made[name])))
                self.generated_tokens += 1
            if len(self._made[name]) >= self._wanted[name]:
                ended.append(name)
        return [self._completion(name, self._made.pop(name)) for name in ended]

    def take_started(self) -> Sequence[str]:
        started, self._started = self._started, []
        return started

    def due(self) -> float:
        return 0.0 if self._made else math.inf

    def release(self, trajectory_ids: Collection[str], *, with_kv: bool = False) -> dict[str, PartialResponse]:
        released = {name: _partial(self._made.pop(name)) for name in trajectory_ids if name in self._made}
        for name, partial in released.items() if with_kv else ():
            tokens = len(partial.token_ids)
            released[name] = replace(partial, kv=KV(tokens, memoryview(f"KV of {name}".encode())))
        return released

    def generated(self, since: Mapping[str, int]) -> dict[str, PartialResponse]:
        return {name: _partial(self._made[name][start:]) for name, start in since.items() if name in self._made}

    def status(self) -> EngineStatus:
        running = min(len(self._made), self._slots)
        kv = 3 * len(self._made) + sum(map(len, self._made.values()))
        waiting = len(self._made) - running
        return EngineStatus(running, waiting, self._slots, kv, self._kv_capacity, self.generated_tokens)

    def close(self) -> None:
        self.closed = True

    def _completion(self, name: str, tokens: list[int]) -> Completion:
        if self._fails(name):
            return Completion(name, _partial([]), "failed", "no luck")
        return Completion(name, _partial(tokens), "stop")


def _partial(tokens: list[int]) -> PartialResponse:
    return PartialResponse(np.array(tokens, np.int32), np.full(len(tokens), -0.5, np.float32))


class ScriptedWeights:
    """Keeps the newest `keep` versions that were added."""

    def __init__(self, keep: int = 10**6) -> None:
        self._keep = keep
        self._held: list[PolicyVersion] = []

    def add(self, version: PolicyVersion) -> None:
        self._held = sorted({*self._held, version})[-self._keep :]

    def remove(self, version: PolicyVersion) -> None:
        self._held.remove(version)

    def versions(self) -> list[PolicyVersion]:
        return list(self._held)

    @contextmanager
    def pin(self, version: PolicyVersion) -> Iterator[Path]:
        if version not in self._held:
            raise VersionGone(str(version))
        yield Path(str(version))


class ScriptedBackend:
    """A backend without shared resources; counts its close calls."""

    def __init__(self, weights: ScriptedWeights | None = None) -> None:
        self.weights = weights or ScriptedWeights()
        self.heard: list[PolicyVersion] = []
        self.closed = 0

    def engine(self) -> ScriptedEngine:
        return ScriptedEngine()

    def decode(self, token_ids: list[int]) -> str:
        return str(token_ids)

    def announce(self, version: PolicyVersion) -> None:
        self.heard.append(version)

    def close(self) -> None:
        self.closed += 1


class SilentHeartbeats:
    """Counts urgent heartbeats instead of sending them."""

    def __init__(self) -> None:
        self.changes = 0
        self.closed = False

    def send_now(self) -> None:
        self.changes += 1

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        self.closed = True
