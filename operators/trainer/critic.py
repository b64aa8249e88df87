"""The critic: the policy's trunk with a value head instead of the language model head."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from operators.trainer.config import Precision
from operators.trainer.fused_layers import LayerKernels, fuse_layers
from operators.trainer.packed_attention import PACKED
from operators.trainer.packing import PackedTokens
from operators.trainer.policy import activations, hidden_states, place, trainable_model


class Critic(nn.Module):
    """Predicts the return from each token on; its trunk has the policy's architecture and initial weights.

    The value head is initialised to zeros: values start at 0, without randomness.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        *,
        gradient_checkpointing: bool,
        precision: Precision,
        mesh: DeviceMesh | None,
        keep_gathered: bool,
        kernels: LayerKernels | None,
    ) -> None:
        super().__init__()
        self._precision = precision
        model = trainable_model(folder, gradient_checkpointing=gradient_checkpointing)
        model.set_attn_implementation(PACKED)
        fuse_layers(model, kernels)
        self.policy = model.base_model
        self.value = nn.Linear(self.policy.config.hidden_size, 1, device="meta")
        place(self, model, folder, device, mesh, precision, keep_gathered=keep_gathered)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, packed: PackedTokens) -> Tensor:
        """V of the context before each of `packed.targets`, float32[m]."""
        with activations(packed, self._precision):
            values: Tensor = self.value(hidden_states(self.policy, packed))
        return packed.gather(values[:, 0].float().clone())  # FSDP's hooks do not accept a view
