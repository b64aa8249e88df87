"""Backends that run a real model: with its tokenizer, and weights from this machine's store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from infra.machine import visible_gpus
from infra.models.chat import continuation
from infra.models.checkpoint_folder import load_tokenizer
from infra.models.config_files import is_without_weights
from infra.models.empty_model import allocate, draw_weights, empty_model, read_weights
from infra.models.sizes import context_length
from infra.store.weight_store import WeightStore
from infra.transport.kv_transfer import KVTransfers
from operators.rollout.config import RolloutConfig
from operators.rollout.engine import CannotGenerate, Engine
from operators.rollout.replica_memory import check_vllm_memory, choose_slots
from operators.rollout.staged.member import StageMember
from operators.rollout.staged.replica_staging import ReplicaStaging
from operators.rollout.staged.service import StageService
from operators.rollout.transformers_engine import TransformersEngine
from schemas.records import PolicyVersion, Prompt


class ModelBackend:
    """A backend without engines: over the model folder `model`, with weights from the store in `store`.

    It runs on the GPUs of process `process`, or on the CPU if the machine has none. Raises CannotGenerate if there are
    too few GPUs.
    """

    def __init__(self, config: RolloutConfig, model: Path, store: Path, process: int = 0) -> None:
        try:
            gpus = config.gpus_of(process, visible_gpus())
        except ValueError as error:
            raise CannotGenerate(str(error)) from error
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)  # nothing in this process has used one yet
        torch.set_num_threads(config.threads)
        self.config, self.model = config, model
        self._tokenizer = load_tokenizer(model)
        self._checked = ""
        self.weights = WeightStore(store)

    def engine_pair(self) -> tuple[Engine, Engine]:
        raise CannotGenerate(f'placement.refresh = "slot" needs two models, and engine {self.config.engine!r} has one')

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


class TransformersBackend(ModelBackend):
    """Engines over the model folder's architecture, with no weight version loaded."""

    _service: StageService | None = None

    def engine(self) -> Engine:
        (engine,) = self._engines(1)
        return engine

    def engine_pair(self) -> tuple[Engine, Engine]:
        one, other = self._engines(2)
        return one, other

    def _engines(self, count: int) -> list[Engine]:
        """So many engines of one replica, which share its device evenly."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        slots = choose_slots(self.config, self.model, device, count)
        return [self._engine(device, slots) for _ in range(count)]

    def _engine(self, device: torch.device, slots: int) -> Engine:
        try:
            model = empty_model(self.model)
            allocate(model, device, getattr(torch, self.config.weights_dtype))
            if is_without_weights(self.model):
                draw_weights(model)
            else:
                read_weights(model, self.model)
            return TransformersEngine(
                model,
                slots=slots,
                context=self.config.context,
                kv_capacity=self.config.kv_capacity,
                speculation=self.config.speculation,
            )
        except ValueError as error:  # of the model or a setting: memory was checked before
            raise CannotGenerate(f"a replica cannot run the model in {self.model} (model.path): {error}") from error

    def staging(
        self, index: int, incarnation: int, engine: Engine, transfers: KVTransfers | None
    ) -> ReplicaStaging | None:
        if transfers is None or not isinstance(engine, TransformersEngine):
            return None
        if self._service is None:
            self._service = StageService(transfers)
        member = StageMember(index, incarnation, engine, self.weights.root)
        return ReplicaStaging(member, self.weights, self._service)


class VllmBackend(ModelBackend):
    """Engines over the model folder, with no weight version loaded."""

    def engine(self) -> Engine:
        # Deferred: vLLM is not always installed.
        from operators.rollout.vllm_engine import VllmEngine, device_memory, memory_share, open_vllm

        config = self.config
        check_vllm_memory(config, self.model, device_memory(), memory_share(config))
        options: dict[str, Any] = dict(config.vllm)
        vllm = open_vllm(
            self.model,
            token_sampler=config.token_sampler,
            slots=config.most_slots,
            context=config.context or context_length(self.model),
            kv_capacity=config.kv_capacity,
            dtype=config.weights_dtype,
            gpus=config.tensor_parallel,
            **options,
        )
        return VllmEngine(vllm)
