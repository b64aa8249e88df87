"""TwoVersionEngine: an engine for two weight versions, so that requests of the older one finish while others begin."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from operators.rollout.engine import Completion, Engine, EngineStatus, PartialResponse, Request
from schemas.records import PolicyVersion


class TwoVersionEngine:
    """An `Engine` over two others on the same device, each with a version of its own: `newer` starts what is submitted.

    Weights are loaded into one that has no requests. Each request stays in the engine that started it, so it runs under
    one version. Both hold a whole model and KV for all slots; the caller submits as many requests as one of them takes.
    """

    def __init__(self, newer: Engine, older: Engine) -> None:
        self._newer, self._older = newer, older
        self._engines: dict[str, Engine] = {}
        """The engine of each request."""

    @property
    def version(self) -> PolicyVersion | None:
        """The version of the requests that begin now, None before the first."""
        return self._newer.version

    def may_load(self) -> bool:
        """Whether one of the engines is empty."""
        return not (self._has(self._newer) and self._has(self._older))

    def load(self, weights: Path, version: PolicyVersion) -> None:
        """As every engine's, also while requests run; raises RuntimeError while they run under two versions."""
        if not self.may_load():
            raise RuntimeError(f"requests of two versions run; {version} cannot be loaded")
        if self._has(self._newer):
            self._newer, self._older = self._older, self._newer
        self._newer.load(weights, version)

    def submit(self, request: Request) -> None:
        """As every engine's."""
        name = request.trajectory_id
        if name in self._engines:
            raise ValueError(f"trajectory {name!r} is already in the engine")
        self._newer.submit(request)
        self._engines[name] = self._newer

    def step(self) -> Sequence[Completion]:
        """Run a round of each version's requests."""
        done = [each for engine in (self._older, self._newer) if self._has(engine) for each in engine.step()]
        for each in done:
            del self._engines[each.trajectory_id]
        return done

    def take_started(self) -> Sequence[str]:
        """As every engine's."""
        return [*self._older.take_started(), *self._newer.take_started()]

    def due(self) -> float:
        """As every engine's."""
        return min(self._older.due(), self._newer.due())

    def release(self, trajectory_ids: Collection[str], *, with_kv: bool = False) -> dict[str, PartialResponse]:
        """As every engine's."""
        released: dict[str, PartialResponse] = {}
        for engine in (self._older, self._newer):
            here = [name for name in trajectory_ids if self._engines.get(name) is engine]
            released |= engine.release(here, with_kv=with_kv) if here else {}
        for name in released:
            del self._engines[name]
        return released

    def generated(self, since: Mapping[str, int]) -> dict[str, PartialResponse]:
        """As every engine's."""
        found: dict[str, PartialResponse] = {}
        for engine in (self._older, self._newer):
            here = {name: start for name, start in since.items() if self._engines.get(name) is engine}
            found |= engine.generated(here) if here else {}
        return found

    def status(self) -> EngineStatus:
        """The load of both; the slots are those of one."""
        older, newer = self._older.status(), self._newer.status()
        return replace(
            newer,
            running=older.running + newer.running,
            waiting=older.waiting + newer.waiting,
            kv_used=older.kv_used + newer.kv_used,
            kv_capacity=older.kv_capacity + newer.kv_capacity,
            tokens_generated=older.tokens_generated + newer.tokens_generated,
            model_seconds=older.model_seconds + newer.model_seconds,
            drafted=older.drafted + newer.drafted,
            accepted=older.accepted + newer.accepted,
        )

    def close(self) -> None:
        """Free the resources of both."""
        self._older.close()
        self._newer.close()

    def _has(self, engine: Engine) -> bool:
        return any(each is engine for each in self._engines.values())
