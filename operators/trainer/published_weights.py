"""The weights that rollouts load: those of a plain model, under its names, gathered one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infra.models.checkpoint_names import checkpoint_tensors
from infra.models.weights import distinct_tensors
from operators.trainer.lora import delta_of, is_adapter, plain_name
from operators.trainer.ranks import full_tensor


class PublishedWeights:
    """The weights of the plain model that is equivalent to `model`, which may be sharded and have adapters.

    Floating-point tensors are rounded to `dtype`, if given, before they are gathered.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
        self._model, self._dtype = model, dtype

    def specs(self) -> dict[str, Tensor]:
        """The tensors' names, dtypes and shapes, as tensors on the meta device."""
        with torch.no_grad():
            return {
                name: view
                for names, tensor in self._tensors()
                for name, view in self._split(names, self._empty(tensor))
            }

    @torch.no_grad()
    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor with its name, in the order of `specs`: whole, until the next one is taken.

        A collective: every rank must take all of them. Tensors may be views of the model's memory.
        """
        for names, tensor in self._tensors():
            delta = delta_of(self._model, names[0])
            own = tensor if delta is None else tensor + delta
            yield from self._split(names, full_tensor(self._rounded(own)))

    def _tensors(self) -> Iterator[tuple[list[str], Tensor]]:
        for names, tensor in distinct_tensors(self._model):
            if not is_adapter(names[0]):
                yield names, tensor

    def _split(self, names: list[str], full: Tensor) -> Iterator[tuple[str, Tensor]]:
        kind = getattr(self._model.config, "model_type", "")
        for aliases, view in checkpoint_tensors(kind, [plain_name(name) for name in names], full):
            yield aliases[0], view

    def _empty(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=self._dtype_of(tensor), device="meta")

    def _rounded(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype_of(tensor))

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
