"""Serves requests of people under any weight version of this machine, on an engine of its own: nothing is trained.

One version is loaded at a time. Requests run in their order: those of the loaded version together, and the next version
once the engine is empty. Requests for a version that the store has evicted wait until it has been pulled.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from infra.store.errors import VersionGone
from operators.rollout.engine import Engine, PartialResponse, Request
from operators.rollout.evicted_versions import EvictedVersions
from operators.rollout.weight_loader import Weights
from schemas.records import PolicyVersion, Sampling
from schemas.records.versions import LATEST, NAMES, named_version

PULL_CHECK_S = 0.1
"""While requests only wait for their versions, `step` need not be called more often."""
StreamEvent = dict[str, Any]
"""`id`, new `tokens` and their `logprobs`, `version`, `finish` (None: more follows), `error`."""


@dataclass(frozen=True, eq=False)
class ServedRequest:
    """One request. `version` is a name of a version, see `named_version`."""

    id: str
    version: str
    tokens: np.ndarray
    sampling: Sampling


def find_version(name: str, versions: Collection[PolicyVersion]) -> PolicyVersion:
    """The version among `versions` that `name` names. Raises LookupError."""
    try:
        found = named_version(name, versions)
    except ValueError:
        found = None
    if found is None:
        known = ", ".join(map(str, sorted(versions))) or "none yet"
        raise LookupError(f"this machine has no weight version {name[:40]!r}; it has {known}")
    return found


class _Source(NamedTuple):
    """A version, and how to open its file of weights."""

    version: PolicyVersion
    open: Callable[[], AbstractContextManager[Path]]


class ServedRequests:
    """Runs requests on `engine` with `weights`, and with those of `evicted` versions."""

    def __init__(self, engine: Engine, weights: Weights, evicted: EvictedVersions | None = None) -> None:
        self._engine, self._weights, self._evicted = engine, weights, evicted
        self._waiting: deque[ServedRequest] = deque()
        self._pulling: list[ServedRequest] = []
        """Requests whose version is being pulled."""
        self._running: dict[str, int] = {}
        """By request: the number of its tokens that have been returned."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running) + len(self._pulling)

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do; else requests only wait for their versions."""
        return bool(self._waiting or self._running)

    def submit(self, request: ServedRequest) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def cancel(self, name: str) -> None:
        """Stop a request; nothing more is returned for it."""
        self._waiting = deque(each for each in self._waiting if each.id != name)
        self._pulling = [each for each in self._pulling if each.id != name]
        if self._running.pop(name, None) is not None:
            self._engine.release([name])

    def step(self) -> list[StreamEvent]:
        """Start what can start, run one round of the engine, and return what was generated."""
        self._waiting.extend(self._pulling)
        self._pulling.clear()
        events = list(self._start())
        if not self._running:
            return events
        completions = {each.trajectory_id: each for each in self._engine.step()}
        gained = self._engine.generated(dict(self._running))
        for name, part in gained.items():
            if name in self._running and name not in completions and len(part.token_ids):
                self._running[name] += len(part.token_ids)
                events.append(self._event(name, part, None))
        for name, completion in completions.items():
            if (returned := self._running.pop(name, None)) is not None:
                part = completion.generated.since(returned)
                events.append(self._event(name, part, completion.finish_reason, completion.error))
        return events

    def _start(self) -> Iterator[StreamEvent]:
        capacity = self._engine.status().capacity
        while self._waiting and len(self._running) < capacity:
            request = self._waiting[0]
            try:
                source = self._source(request.version)
                if source is None:
                    self._pulling.append(request)
                elif source.version != self._engine.version and self._running:
                    return
                else:
                    if source.version != self._engine.version:
                        with source.open() as file:
                            self._engine.load(file, source.version)
                    self._engine.submit(Request(request.id, request.tokens, request.sampling))
                    self._running[request.id] = 0
            except VersionGone:
                continue  # evicted meanwhile
            except (LookupError, ValueError) as error:
                yield {"id": request.id, "tokens": [], "logprobs": [], "finish": "failed", "error": str(error)}
            self._waiting.popleft()

    def _source(self, name: str) -> _Source | None:
        """Where the version `name` is; None while it is being pulled. Raises LookupError."""
        try:
            version = find_version(name, self._weights.versions())
            return _Source(version, partial(self._weights.pin, version))
        except LookupError:
            if self._evicted is None or name == LATEST or not re.fullmatch(NAMES, name):
                raise
        awaited = [each.version for each in (*self._waiting, *self._pulling)]
        pulled = self._evicted.get(name, awaited)
        return None if pulled is None else _Source(pulled.version, lambda: nullcontext(pulled.file))

    def _event(self, name: str, part: PartialResponse, finish: str | None, error: str | None = None) -> StreamEvent:
        return {
            "id": name,
            "tokens": part.token_ids.tolist(),
            "logprobs": part.logprobs.tolist(),
            "version": str(self._engine.version),
            "finish": finish,
            "error": error,
        }
