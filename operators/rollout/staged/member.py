"""A replica as a member of stage groups: which stages of its engine are in use, and why it can have none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from infra.models.partial_weights import load_parts, open_arriving
from operators.rollout.staged.stage import StageModel
from operators.rollout.transformers_engine import TransformersEngine
from schemas.records import PolicyVersion, WeightVersion


class WeightClaims:
    """The versions that the stages of one engine use. A thread that changes weights does so within `changing`.

    Stages for which there was no memory have their KV in that of the engine: it cannot compute by itself meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stages: dict[str, PolicyVersion] = {}
        self._sharing: set[str] = set()

    @property
    def version(self) -> PolicyVersion | None:
        """The version that stages use; None if there are none."""
        return next(iter(self._stages.values()), None)

    def version_besides(self, group: str) -> PolicyVersion | None:
        """The version that stages of other groups than `group` use; None if there are none."""
        return next((version for name, version in self._stages.items() if name != group), None)

    def shared_besides(self, group: str) -> bool:
        """Whether stages of other groups than `group` use the engine's own KV memory."""
        return not self._sharing <= {group}

    def share(self, group: str) -> None:
        """The stage of `group`, which is being claimed, uses the engine's own KV memory."""
        self._sharing.add(group)

    @contextmanager
    def changing(self, version: PolicyVersion) -> Iterator[bool]:
        """Whether the engine may load `version` as a whole during the `with` block; no stage starts meanwhile."""
        with self._lock:
            yield self.version in (None, version) and not self._sharing

    @contextmanager
    def claiming(self, group: str, version: PolicyVersion) -> Iterator[bool]:
        """Whether a stage may use `version`; if so and the block succeeds, that of `group` does until `release`."""
        with self._lock:
            free = self.version in (None, version)
            yield free
            if free:
                self._stages[group] = version

    def release(self, group: str) -> None:
        """The stage of `group` has ended. Does nothing if there is none."""
        self._stages.pop(group, None)
        self._sharing.discard(group)


_MANIFESTS = 8


class StageRefused(RuntimeError):
    """A replica cannot run the stage that was asked for."""


class StageMember:
    """The stages of replica `replica`, which run in the model of `engine` with weights from the folder `store`."""

    def __init__(self, replica: int, incarnation: int, engine: TransformersEngine, store: Path) -> None:
        self.replica, self.incarnation, self.engine, self.store = replica, incarnation, engine, store
        self.claims = WeightClaims()
        self._manifests: dict[PolicyVersion, WeightVersion] = {}
        self._stages: dict[str, StageModel] = {}
        self._lock = threading.Lock()

    @property
    def refusal(self) -> str:
        """Why this engine can have no stages; empty if it can."""
        return "" if self.engine.direct else "its model does not have the layout of llama, or runs in its own forward"

    @property
    def serving(self) -> tuple[str, range]:
        """The group that it serves, and its layers; an empty name if there is none."""
        with self._lock:
            found = next(reversed(self._stages.items()), None) if self._stages else None
        return ("", range(0)) if found is None else (found[0], found[1].layers)

    def announce(self, manifest: WeightVersion) -> None:
        """Record the manifest of a published version."""
        self._manifests[manifest.version] = manifest
        for version in [*self._manifests][:-_MANIFESTS]:
            if version != self.claims.version:  # its stage may get another group
                del self._manifests[version]

    def open(
        self, group: str, incarnation: int, version: PolicyVersion, layers: range, rows: int, context: int
    ) -> StageModel:
        """Load `layers` of `version` and return a stage with them.

        Raises StageRefused, PartsMissing if they are not here, ValueError for layers that the model does not have.
        """
        if incarnation != self.incarnation:
            raise StageRefused(f"replica {self.replica} is incarnation {self.incarnation}, not {incarnation}")
        stage = self.load(group, version, layers, rows, context, ends=False)
        with self._lock:
            self._stages[group] = stage
        return stage

    def load(
        self, group: str, version: PolicyVersion, layers: range, rows: int, context: int, *, ends: bool
    ) -> StageModel:
        """A stage of `group` with these layers of `version`, whose weights stay until `end`. Raises as `open`."""
        modules, engine = self.engine.modules, self.engine
        if modules is None or self.refusal:
            raise StageRefused(f"replica {self.replica} cannot run in stages: {self.refusal}")
        if not 0 <= layers.start <= layers.stop <= len(modules.layers):
            raise StageRefused(f"the model has {len(modules.layers)} layers, not {layers.start} to {layers.stop}")
        if not (0 < rows <= engine.slots and 0 < context <= engine.context):
            raise StageRefused(
                f"replica {self.replica} has {engine.slots} slots of {engine.context} tokens, not {rows} of {context}"
            )
        with self.claims.claiming(group, version) as free:
            if not free or engine.version not in (None, version):
                held = self.claims.version or engine.version
                raise StageRefused(f"replica {self.replica} uses weight version {held}, not {version}")
            if engine.version is None or engine.staged:
                manifest = self._manifests.get(version)
                if manifest is None:
                    raise StageRefused(f"replica {self.replica} has no manifest of version {version}")
                data = open_arriving(self.store, version)
                with torch.inference_mode():
                    load_parts(engine.model, manifest, data, layers, ends=ends)
            try:  # within the claim: without its memory there is no stage that keeps the version
                return StageModel(modules, layers, rows, context)
            except (RuntimeError, MemoryError) as error:
                if (unused := engine.unused_slots) is None:
                    raise StageRefused(
                        f"no memory for the KV of {len(layers)} layers, {rows} rows of {context} tokens: {error}"
                    ) from error
                stage = StageModel(modules, layers, rows, context, unused.part(layers))
                self.claims.share(group)  # slots that were chosen by memory leave no room for others
                return stage

    def end(self, group: str) -> None:
        """The stage of `group` has ended."""
        with self._lock:
            self._stages.pop(group, None)
        self.claims.release(group)
