"""The weights that rollouts load: those of a plain model, under its names, gathered one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from infra.models.checkpoint_names import checkpoint_tensors
from infra.models.local_part import local_part
from infra.models.weights import distinct_tensors
from operators.trainer.lora import delta_of, is_adapter, plain_name
from operators.trainer.ranks import ALONE, Ranks, full_tensor
from operators.trainer.weight_parts import NamedRange, WeightPart


class PublishedWeights:
    """The weights of the plain model that is equivalent to `model`, which may be sharded and have adapters.

    Floating-point tensors are rounded to `dtype`, if given, before they are gathered. `read` returns the value of a
    tensor, given with its names, when it is taken; the tensors of `model` may then be on the meta device.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype | None = None,
        ranks: Ranks = ALONE,
        read: Callable[[list[str], Tensor], Tensor] = lambda names, tensor: tensor,
    ) -> None:
        self._model, self._dtype, self._ranks, self._read = model, dtype, ranks, read

    @cached_property
    def at_hand(self) -> bool:
        """Whether `parts` are the model's own memory: with adapters each is computed."""
        return not any(is_adapter(names[0]) for names, _ in distinct_tensors(self._model))

    def specs(self) -> dict[str, Tensor]:
        """The tensors' names, dtypes and shapes, as tensors on the meta device."""
        return {name: view for views in self._views.values() for name, view in views}

    @cached_property
    @torch.no_grad()
    def _views(self) -> dict[str, list[tuple[str, Tensor]]]:
        """The published tensors that each tensor of the model is, by its first name: the same for every version."""
        return {names[0]: list(self._split(names, self._empty(tensor))) for names, tensor in self._tensors()}

    @torch.no_grad()
    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor with its name, in the order of `specs`: whole, until the next one is taken.

        A collective: every rank must take all of them. Tensors may be views of the model's memory.
        """
        for names, tensor in self._tensors():
            merged = self._with_adapter(names[0], self._read(names, tensor))
            yield from self._split(names, full_tensor(merged.to(self._dtype_of(merged))))

    @torch.no_grad()
    def parts(self) -> Iterator[WeightPart]:
        """This rank's part of each tensor, in the order of `items`; of all ranks' parts each element is in one.

        With adapters a collective: every rank must take all of them. Elements may be views of the model's memory.
        """
        for names, tensor in self._tensors():
            own = self._with_adapter(names[0], tensor)
            begin, elements = local_part(own)
            if not (self._ranks.of_first_copy if isinstance(own, DTensor) else self._ranks.rank == 0):
                elements = elements[:0]  # another rank has the same
            views = self._views[names[0]]
            ranges = tuple(NamedRange(name, int(view.storage_offset()), view.numel()) for name, view in views)
            yield WeightPart(ranges, begin, elements, self._dtype_of(tensor))

    def _with_adapter(self, name: str, tensor: Tensor) -> Tensor:
        delta = delta_of(self._model, name)
        if delta is None:
            return tensor
        if isinstance(tensor, DTensor) and isinstance(delta, DTensor):
            delta = delta.redistribute(placements=tensor.placements)
        return tensor + delta

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

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
