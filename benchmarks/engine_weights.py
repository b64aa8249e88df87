"""The cost of loading weights into an engine: a swap beside a copy of the same bytes, and tokens/s with refreshes.

A refresh does what the schedule `partial_rollout` does: the engine releases all running requests, loads weights from
this machine's store, and resumes the requests; it recomputes their KV under the new weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine_sides import Measured, now, requests_of, since
from benchmarks.stores import temporary_store
from infra.models.weights import save_weights
from infra.store.names import default_root
from infra.store.weight_store import WeightStore
from operators.rollout.engine import Engine, Request
from schemas.records import PolicyVersion

VERSIONS = (PolicyVersion(1, 1), PolicyVersion(1, 2))


@contextmanager
def two_versions(folder: Path, root: Path | None = None) -> Iterator[WeightStore]:
    """A store in `root` (default: in shared memory) with two versions of the weights in model folder `folder`."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with temporary_store(root or default_root("benchmark")) as store:
        for version in VERSIONS:
            with torch.no_grad():
                model.get_input_embeddings().weight.mul_(1.0 + 1e-3)
            file = folder / "version"
            save_weights(model, file)
            with store.begin(version, file.stat().st_size) as arriving, file.open("rb") as source:
                source.readinto(arriving.view)
                arriving.seal()
            file.unlink()
        yield store


def measure_swap(engine: Engine, store: WeightStore, repetitions: int) -> tuple[int, list[tuple[Measured, Measured]]]:
    """Alternate loads of two versions with one thread's copies of as many bytes between allocated memory. Returns the
    number of bytes, and the times of each repetition's load and copy."""
    size = store.path(VERSIONS[0]).stat().st_size
    source, target = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
    pairs = []
    for _, version in zip(range(repetitions + 1), itertools.cycle(VERSIONS), strict=False):
        started = now()
        load_version(engine, store, version)
        load, loaded = since(started), now()
        target.copy_(source)
        pairs.append((load, since(loaded)))
    return size, pairs[1:]


class Feed:
    """Keeps `engine` busy with rounds of requests of `lengths` tokens."""

    def __init__(self, engine: Engine, lengths: np.ndarray, group: int) -> None:
        self.engine, self._lengths, self._group = engine, lengths, group
        self._requests: dict[str, Request] = {}
        self._rounds = itertools.count()

    def tokens_in(self, seconds: float) -> int:
        """Step for `seconds`; return the generated tokens. Submits a round when fewer requests wait than slots."""
        before, started = self.engine.status().tokens_generated, now()
        while since(started).wall < seconds:
            if self.engine.status().waiting < self.engine.status().capacity:
                for request in requests_of(self._lengths, self._group, next(self._rounds)):
                    self._requests[request.trajectory_id] = request
                    self.engine.submit(request)
            for done in self.engine.step():
                del self._requests[done.trajectory_id]
        return self.engine.status().tokens_generated - before

    def refresh(self, store: WeightStore, version: PolicyVersion) -> None:
        """Load `version` and resume all requests under it."""
        released = self.engine.release(list(self._requests))
        load_version(self.engine, store, version)
        for name, request in self._requests.items():
            known = released[name]
            self.engine.submit(replace(request, partial=known if len(known.token_ids) else None))

    def end(self) -> None:
        """Release all running requests."""
        self.engine.release(list(self._requests))


def measure_refresh(
    feed: Feed, store: WeightStore, every_s: float, repetitions: int
) -> list[tuple[Measured, Measured]]:
    """Tokens/s without and with a refresh every `every_s` seconds, alternating, each over two periods."""
    versions, rates = itertools.cycle(VERSIONS), []
    feed.tokens_in(every_s)
    for turn in range(2 * repetitions):
        started, tokens = now(), 0
        for _ in range(2):
            began = now()
            if turn % 2:
                feed.refresh(store, next(versions))
            tokens += feed.tokens_in(every_s - since(began).wall)
        took = since(started)
        rates.append(Measured(tokens / took.wall, tokens / took.cpu))
    feed.end()
    return list(zip(rates[::2], rates[1::2], strict=True))


def load_version(engine: Engine, store: WeightStore, version: PolicyVersion) -> None:
    """Pin and load `version`, as a replica does."""
    with store.pin(version) as file:
        engine.load(file, version)
