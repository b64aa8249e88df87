"""The common part of backends that run a real model: its tokenizer, and this machine's weight store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from infra.machine import visible_gpus
from infra.models.chat import continuation
from infra.models.checkpoint_folder import load_tokenizer
from infra.store.weight_store import WeightStore
from infra.transport.kv_transfer import KVTransfers
from operators.rollout.config import RolloutConfig
from operators.rollout.engine import Engine
from schemas.records import PolicyVersion, Prompt

if TYPE_CHECKING:
    from operators.rollout.staged.replica_staging import ReplicaStaging


class ModelBackend:
    """A backend without engines: over the model folder `model`, with weights from the store in `store`.

    It runs on the GPUs of process `process`, or on the CPU if the machine has none. Raises ValueError if there are too
    few GPUs.
    """

    def __init__(self, config: RolloutConfig, model: Path, store: Path, process: int = 0) -> None:
        gpus = config.gpus_of(process, visible_gpus())
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)  # nothing in this process has used one yet
        torch.set_num_threads(config.threads)
        self.config, self.model = config, model
        self._tokenizer = load_tokenizer(model)
        self._checked = ""
        self.weights = WeightStore(store)

    def staging(
        self, index: int, incarnation: int, engine: Engine, transfers: KVTransfers | None
    ) -> ReplicaStaging | None:
        """None: the engine runs whole models only."""
        return None

    def decode(self, token_ids: list[int]) -> str:
        """The text of `token_ids`, without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def encode(self, text: str) -> list[int]:
        """The tokens of `text` after others; the spelling of a special token is encoded as ordinary text."""
        return continuation(self._tokenizer, text, split_special_tokens=True)

    def check(self, prompt: Prompt) -> None:
        """Raise ValueError if the prompt's tokens are not those of its text by this model's tokenizer."""
        if prompt.prompt_id == self._checked:  # the members of a group arrive together
            return
        given = prompt.token_ids.to_pylist()
        if all(given != self._tokenizer.encode(prompt.text, add_special_tokens=special) for special in (True, False)):
            raise ValueError(f"prompt {prompt.prompt_id} was encoded with another tokenizer than that of {self.model}")
        self._checked = prompt.prompt_id

    def announce(self, version: PolicyVersion) -> None:
        """Does nothing: the store lists its complete versions."""

    def close(self) -> None:
        """Close the store."""
        self.weights.close()
