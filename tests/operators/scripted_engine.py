"""An engine that generates by script, weights that come and go, and heartbeats that nobody sends."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from infra.store.errors import VersionGone
from operators.rollout.engine import Completion, EngineStatus, Partial, Request
from schemas.records import PolicyVersion, WeightVersion


class ScriptedEngine:
    """A request takes `steps(trajectory_id)` steps, a token each; `fails` says which come to nothing.

    A prompt of `context` tokens is refused.
    """

    def __init__(
        self,
        slots: int = 4,
        steps: Callable[[str], int] = lambda name: 1,
        fails: Callable[[str], bool] = lambda name: False,
        context: int = 64,
    ) -> None:
        self._slots, self._steps, self._fails, self._context = slots, steps, fails, context
        self._left: dict[str, int] = {}
        self._made: dict[str, int] = {}
        self.version: PolicyVersion | None = None
        self.loads: list[PolicyVersion] = []
        self.closed = False

    def load(self, weights: Path, version: PolicyVersion) -> None:
        if self._left:
            raise RuntimeError(f"weights change under {sorted(self._left)}")
        self.version = version
        self.loads.append(version)

    def submit(self, request: Request) -> None:
        if len(request.prompt) >= self._context:
            raise ValueError(f"a prompt of {len(request.prompt)} tokens leaves no room")
        if request.trajectory_id in self._left:
            raise ValueError(f"{request.trajectory_id} is here already")
        self._left[request.trajectory_id] = self._made[request.trajectory_id] = self._steps(request.trajectory_id)

    def step(self) -> Sequence[Completion]:
        for name in list(self._left)[: self._slots]:
            self._left[name] -= 1
        ended = [name for name, left in self._left.items() if left <= 0]
        for name in ended:
            del self._left[name]
        assert self.version is not None
        return [self._completion(name, self._made.pop(name), self.version.number) for name in ended]

    def due(self) -> float:
        return 0.0 if self._left else math.inf

    def generated(self, since: Mapping[str, int]) -> dict[str, Partial]:
        return {}

    def release(self, trajectory_ids: Collection[str]) -> dict[str, Partial]:
        gone = [name for name in trajectory_ids if name in self._left]
        for name in gone:
            del self._left[name], self._made[name]
        return {name: Partial(np.zeros(0, np.int32), np.zeros(0, np.float32)) for name in gone}

    def status(self) -> EngineStatus:
        running = min(len(self._left), self._slots)
        return EngineStatus(running, len(self._left) - running, self._slots, 0, 1000, 0)

    def close(self) -> None:
        self.closed = True

    def _completion(self, name: str, count: int, token: int) -> Completion:
        if self._fails(name):
            return Completion(name, Partial(np.zeros(0, np.int32), np.zeros(0, np.float32)), "failed", "no luck")
        generated = Partial(np.full(count, token, np.int32), np.full(count, -0.5, np.float32))
        return Completion(name, generated, "stop")


class ScriptedWeights:
    """The newest `keep` of the versions that were added."""

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
    """What a process shares, where the test has made everything itself; counts how often it was closed."""

    def __init__(self, weights: ScriptedWeights | None = None) -> None:
        self.weights = weights or ScriptedWeights()
        self.heard: list[WeightVersion] = []
        self.closed = 0

    def engine(self) -> ScriptedEngine:
        return ScriptedEngine()

    def decode(self, token_ids: list[int]) -> str:
        return str(token_ids)

    def hear(self, manifest: WeightVersion) -> None:
        self.heard.append(manifest)

    def close(self) -> None:
        self.closed += 1


class SilentHeartbeats:
    """Counts how often placement would have been told at once."""

    def __init__(self) -> None:
        self.changes = 0
        self.step_seconds = 0.0
        self.closed = False

    def changed(self) -> None:
        self.changes += 1

    def close(self) -> None:
        self.closed = True
