"""What is done in the workers of vLLM's, whichever process each is in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infra.models.weights import each_tensor


def take_weights(worker: Any, file: str) -> None:
    """Overwrite the weights of `worker` with the safetensors file `file`, layer by layer, so that there is never more
    than one layer twice."""
    worker.model_runner.reload_weights(weights_iterator=each_tensor(Path(file)))


def clear_kv(worker: Any) -> None:
    """Zero all KV of `worker`, of which no request may hold any."""
    for layer in worker.model_runner.kv_caches:
        for tensor in layer if isinstance(layer, list | tuple) else [layer]:
            tensor.zero_()
