"""Backends: the engines, weights and tokenizer of the replicas of one process. One kind per engine.

A specification travels in the Beam graph; the backend that it opens belongs to the process that runs the step. Heavy
modules (torch, transformers, vllm) are imported when a backend is opened; the emulated backend imports none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from infra.transport.kv_transfer import KVTransfers
from operators.rollout.config import RolloutConfig
from operators.rollout.engine import Engine
from operators.rollout.weight_loader import Weights
from schemas.records import PolicyVersion, Prompt

if TYPE_CHECKING:
    from operators.rollout.staged.replica_staging import ReplicaStaging


class Backend(Protocol):
    """Everything that the replicas of one process share."""

    @property
    def weights(self) -> Weights:
        """The weight versions on this machine."""

    def engine(self) -> Engine:
        """An engine for one more replica."""

    def engine_pair(self) -> tuple[Engine, Engine]:
        """Two engines for one more replica, which share its device. Raises CannotGenerate if there can be none."""

    def staging(
        self, index: int, incarnation: int, engine: Engine, transfers: KVTransfers | None
    ) -> ReplicaStaging | None:
        """The part of replica `index`, which has `engine`, in stage groups; None if it can have none."""

    def decode(self, token_ids: list[int]) -> str:
        """Response tokens as text."""

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`, which is untrusted: none of them is a special token."""

    def check(self, prompt: Prompt) -> None:
        """Raise ValueError if the prompt's tokens are not those of its text by this model's tokenizer."""

    def announce(self, version: PolicyVersion) -> None:
        """Record that a weight version was published."""

    def close(self) -> None:
        """Free what the engines share; each engine is closed before."""


class BackendSpec(Protocol):
    """Describes a backend. Frozen and picklable."""

    def open(self) -> Backend:
        """Open the backend in the process that runs the replicas."""


@dataclass(frozen=True)
class _ModelSpec:
    """Engines over the Hugging Face model in folder `model`, with weights from the store in folder `store`, on the GPUs
    of process `process`. `open` raises CannotGenerate if there are too few GPUs."""

    config: RolloutConfig
    model: Path
    store: Path
    process: int = 0


class TransformersSpec(_ModelSpec):
    """TransformersEngine: runs the model in this process."""

    def open(self) -> Backend:
        from operators.rollout.model_backend import TransformersBackend

        return TransformersBackend(self.config, self.model, self.store, self.process)


class VllmSpec(_ModelSpec):
    """VllmEngine. `open` raises ModuleNotFoundError if vLLM is not installed."""

    def open(self) -> Backend:
        from operators.rollout.model_backend import VllmBackend

        return VllmBackend(self.config, self.model, self.store, self.process)


@dataclass(frozen=True)
class EmulatedSpec:
    """EmulatedEngine: runs `time_scale` times as fast as the machine it emulates.

    Weight versions have no bytes; the newest `keep_versions` count as available.
    """

    config: RolloutConfig
    time_scale: float
    keep_versions: int

    def open(self) -> Backend:
        from operators.rollout.emulated_backend import EmulatedBackend

        return EmulatedBackend(self.config, self.time_scale, self.keep_versions)
