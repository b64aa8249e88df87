"""The transformers backend. Only this module and those of the engine import model code."""

from __future__ import annotations

import torch

from infra.models.empty_model import allocate, empty_model, read_weights
from infra.transport.kv_transfer import KVTransfers
from operators.rollout.engine import Engine
from operators.rollout.model_backend import ModelBackend
from operators.rollout.replica_memory import choose_slots
from operators.rollout.staged.member import StageMember
from operators.rollout.staged.replica_staging import ReplicaStaging
from operators.rollout.staged.service import StageService
from operators.rollout.transformers_engine import TransformersEngine


class TransformersBackend(ModelBackend):
    """Engines over the model folder's architecture, with no weight version loaded."""

    _service: StageService | None = None

    def engine(self) -> Engine:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        slots = choose_slots(self.config, self.model, device)
        model = empty_model(self.model)
        allocate(model, device, getattr(torch, self.config.weights_dtype))
        read_weights(model, self.model)
        return TransformersEngine(
            model,
            slots=slots,
            context=self.config.context,
            kv_capacity=self.config.kv_capacity,
            speculation=self.config.speculation,
        )

    def staging(
        self, index: int, incarnation: int, engine: Engine, transfers: KVTransfers | None
    ) -> ReplicaStaging | None:
        if transfers is None or not isinstance(engine, TransformersEngine):
            return None
        if self._service is None:
            self._service = StageService(transfers)
        member = StageMember(index, incarnation, engine, self.weights.root)
        return ReplicaStaging(member, self.weights, self._service)
