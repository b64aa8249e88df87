"""The main memory that the containers of a run request, computed from the model's shape where its files are here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from operators.trainer.memory_plan import GIB, plan_memory, shape_of
from pipelines.config import Config

PROCESS_GIB = 2
"""A process with its libraries."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_WITHOUT_MODEL: Mapping[str, int] = {"rollout": 16, "trainer": 32, "relay": 8}


@dataclass(frozen=True)
class HostMemory:
    """GiB of one process by role."""

    roles: Mapping[str, int] = field(default_factory=dict)

    def of(self, role: str) -> int:
        """GiB of one process of `role`."""
        return self.roles.get(role, PROCESS_GIB)


def model_copy(config: Config) -> Path | None:
    """The model's files on this machine; None if they are not here."""
    folder = Path(config.deploy.model_folder or config.model.path or "/")
    return folder if (folder / "config.json").is_file() else None


def host_memory(config: Config) -> HostMemory:
    """The memory of each role's process. Raises ValueError if the model's files are invalid.

    A machine's weight versions count for the relay and for the trainer: a page of the store is charged to the container
    that writes it. A rollout holds a copy of the weights while it loads them; on a CPU it also has the KV cache.
    """
    folder = model_copy(config)
    if config.emulated:
        return HostMemory()
    if folder is None:
        return HostMemory(_WITHOUT_MODEL)
    shape = shape_of(folder)
    weights = shape.parameters * _BYTES[config.rollout.weights_dtype]
    stored = weights * (config.relay.keep_versions + 1)
    on_gpu = config.trainer.device.startswith("cuda")
    rank = (
        2 * shape.largest_layer * 4
        if on_gpu
        else plan_memory(shape, config.trainer.ranks, config.trainer.learner).total
    )
    capacity = config.rollout.kv_capacity or config.rollout.slots * (config.rollout.context or 4096)
    # Keys and values are at most as wide as the model.
    kv = 0 if on_gpu else 2 * shape.layers * shape.width * capacity * _BYTES[config.rollout.weights_dtype]
    sizes = {
        "relay": stored,
        "trainer": stored + rank,
        "rollout": weights + kv + config.rollout.kv_megabytes * 10**6,
    }
    return HostMemory({role: PROCESS_GIB + math.ceil(size / GIB) for role, size in sizes.items()})
