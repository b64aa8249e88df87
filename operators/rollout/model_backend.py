"""What backends that run a real model share: its folder's tokenizer, and the weights in this machine's store."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from infra.gpus import visible_gpus
from infra.models.checkpoint_folder import load_tokenizer
from infra.store.weight_store import WeightStore
from operators.rollout.config import RolloutConfig
from schemas.records import PolicyVersion, Prompt


class ModelBackend:
    """Everything of a backend but its engines: over the model folder `model`, weights from the store in `store`.

    They run on the GPUs of process `process`, or on the CPU where there are none. Raises ValueError where there are too
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

    def decode(self, token_ids: list[int]) -> str:
        """The text of `token_ids`, special tokens left out."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`; what reads like a special token is spelt out."""
        return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    def check(self, prompt: Prompt) -> None:
        """Raise ValueError if its tokens are not those that this model's tokenizer makes of its text."""
        if prompt.prompt_id == self._checked:  # the members of a group come together
            return
        given = prompt.token_ids.to_pylist()
        if all(given != self._tokenizer.encode(prompt.text, add_special_tokens=special) for special in (True, False)):
            raise ValueError(f"prompt {prompt.prompt_id} was made with another tokenizer than that of {self.model}")
        self._checked = prompt.prompt_id

    def announce(self, version: PolicyVersion) -> None:
        """The store knows by itself which versions are complete."""

    def close(self) -> None:
        """Let go of the store."""
        self.weights.close()
