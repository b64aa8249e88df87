"""Functions that run in the workers of vLLM, in whichever process each worker is.

On a CPU vLLM keeps the weights of linear layers only in the packed format of its kernels. vLLM's own reload takes 1.5
to 3 times as long as `_load_packed`, and leaves old weights in a head that is tied to the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer, restore_layer_on_meta
from vllm.platforms import current_platform

from infra.models.weights import mapped_tensors

_UNQUANTIZED = {type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod}
"""The quantization methods that `_load_packed` supports."""


def load_worker_weights(worker: Any, file: str) -> None:
    """Overwrite the weights of `worker` with the safetensors file `file`, layer by layer, so that at most one layer is
    in memory twice. Raises RuntimeError for a layer without weights in the file."""
    runner, tensors = worker.model_runner, mapped_tensors(Path(file))
    model, on_cpu = runner.get_model(), current_platform.is_cpu()
    if (
        on_cpu
        and not runner.model_config.use_mla
        and {type(_method(layer)) for layer in model.modules()} <= _UNQUANTIZED
    ):
        _load_packed(model, tensors)
    else:
        if on_cpu:
            _pack_experts_again(model)
        runner.reload_weights(weights_iterator=tensors)
    if on_cpu:
        _pack_embeddings(model)


def clear_kv(worker: Any) -> None:
    """Zero all KV of `worker`; no request may hold any."""
    for layer in worker.model_runner.kv_caches:
        for tensor in layer if isinstance(layer, list | tuple) else [layer]:
            tensor.zero_()


def _method(layer: torch.nn.Module) -> Any:
    return getattr(layer, "quant_method", None)


def _load_packed(model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    linear = [_LinearLoad(layer) for layer in model.modules() if isinstance(_method(layer), UnquantizedLinearMethod)]
    model.load_weights(tensors)
    for layer in linear:
        layer.fill()


def _pack_experts_again(model: torch.nn.Module) -> None:
    """Have the next reload pack the experts' weights for the CPU's kernels, which vLLM does at the first load alone."""
    for layer in model.modules():
        if isinstance(method := _method(layer), UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def _pack_embeddings(model: torch.nn.Module) -> None:
    """Pack embeddings and heads; layers that share their weights share one packed copy."""
    packed: dict[int, Any] = {}
    for layer in model.modules():
        if isinstance(_method(layer), UnquantizedEmbeddingMethod):
            if id(layer.weight) not in packed:
                _pack(layer)
            layer.cpu_linear = packed.setdefault(id(layer.weight), layer.cpu_linear)


def _pack(layer: Any) -> None:
    layer.cpu_linear = None  # frees the memory that the new packed weights need
    layer.quant_method.process_weights_after_loading(layer)


class _LinearLoad:
    """Loads one linear layer: records the weights that belong to it, then materializes and packs them."""

    def __init__(self, layer: Any) -> None:
        self._layer, self._info = layer, get_layerwise_info(layer)
        self._parts: list[Callable[[torch.Tensor], None]] = []
        restore_layer_on_meta(layer, self._info)
        self._loader = layer.weight.weight_loader
        layer.weight.weight_loader = self._record_part

    def _record_part(self, _: torch.Tensor, *arguments: Any, **named: Any) -> None:
        self._parts.append(lambda weight: self._loader(weight, *arguments, **named))

    def fill(self) -> None:
        layer = self._layer
        layer.weight.weight_loader = self._loader
        if not self._parts:
            raise RuntimeError(f"the weights file has no weights for {layer.prefix}")
        with torch.no_grad():
            materialize_layer(layer, self._info)
            while self._parts:  # each part keeps the file mapped
                self._parts.pop()(layer.weight)
        _pack(layer)
