"""What the replicas of one process are made of: engines, weights, and how tokens read. One kind for each engine.

The specifications travel in the graph; what they open lives in the process that runs it. Nothing heavy is imported
before it is opened, and an emulation imports nothing heavy at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from operators.rollout.config import RolloutConfig
from operators.rollout.engine import Engine
from operators.rollout.replica import Weights
from schemas.records import PolicyVersion, Prompt


class Backend(Protocol):
    """Everything that the replicas of one process share."""

    @property
    def weights(self) -> Weights:
        """Where replicas find weights."""

    def engine(self) -> Engine:
        """An engine for one more replica."""

    def decode(self, token_ids: list[int]) -> str:
        """Response tokens as text."""

    def encode(self, text: str) -> list[int]:
        """`text` that nobody has read as tokens, none of them special."""

    def check(self, prompt: Prompt) -> None:
        """Raise ValueError if its tokens are not those that this model's tokenizer makes of its text."""

    def announce(self, version: PolicyVersion) -> None:
        """A weight version was announced."""

    def close(self) -> None:
        """Let go of what the engines shared; each engine is closed before."""


class BackendSpec(Protocol):
    """Opens a backend. Frozen and picklable."""

    def open(self) -> Backend:
        """The backend, in the process that runs the replicas."""


@dataclass(frozen=True)
class _ModelSpec:
    """Engines over the Hugging Face model in folder `model`, weights from the store in folder `store`, on the GPUs of
    process `process`. Opening it raises ValueError where GPUs are too few."""

    config: RolloutConfig
    model: Path
    store: Path
    process: int = 0


class TransformersSpec(_ModelSpec):
    """Engines that run the model in this process."""

    def open(self) -> Backend:
        from operators.rollout.transformers_backend import TransformersBackend

        return TransformersBackend(self.config, self.model, self.store, self.process)


class VllmSpec(_ModelSpec):
    """vLLM's engines. When it is opened it raises ModuleNotFoundError where vLLM is not installed."""

    def open(self) -> Backend:
        from operators.rollout.vllm_backend import VllmBackend

        return VllmBackend(self.config, self.model, self.store, self.process)


@dataclass(frozen=True)
class EmulatedSpec:
    """Engines that take `time_scale` times less time than the machine they stand for.

    Of the weight versions, which have no bytes, the newest `keep_versions` count as here.
    """

    config: RolloutConfig
    time_scale: float
    keep_versions: int

    def open(self) -> Backend:
        from operators.rollout.emulated_backend import EmulatedBackend

        return EmulatedBackend(self.config, self.time_scale, self.keep_versions)
