"""The memory of known accelerators, and the KV that is left of it beside the weights."""

from __future__ import annotations

from dataclasses import dataclass

from infra.name_lookup import suggest_name
from pipelines.simulate.prediction.cluster import Cluster

MACHINES = {"A100-40": 40.0, "A100": 80.0, "H100": 80.0, "H800": 80.0, "H200": 141.0, "B200": 192.0, "L40S": 48.0}
"""GB of one accelerator."""
USABLE = 0.9
"""Share of the memory for weights and KV; the rest is for activations and the library."""
TRAINED = 8.0
"""GB of a trainer for a GB of weights: weights and gradients in bfloat16, weights and Adam's two moments in float32."""


@dataclass(frozen=True)
class Memory:
    """The accelerators `machine`, the size of the model in GB, and of its KV in kB a token (0: unknown)."""

    machine: str
    weights_gb: float
    kv_kb: float = 0.0

    def check(self, cluster: Cluster) -> None:
        """Raise ValueError if the weights or the KV of a replica, or the trainer's state, do not fit."""
        kv_gb = kv_gigabytes(self.machine, cluster.gpus_per_replica, self.weights_gb)
        needed, gpus = TRAINED * self.weights_gb, cluster.train_gpus
        if needed > (memory := USABLE * memory_of(self.machine) * gpus):
            raise ValueError(
                f"training weights of {self.weights_gb:g} GB takes {needed:g} GB (gradients and Adam's state, too), "
                f"which do not fit on {gpus} x {self.machine} with {memory:.0f} GB: give the trainer more GPUs"
            )
        rollout = cluster.config.rollout
        tokens = rollout.kv_capacity or rollout.most_slots * cluster.config.context
        if (wanted := tokens * self.kv_kb / 1e6) > kv_gb:
            raise ValueError(
                f"KV of {tokens:,} tokens takes {wanted:.0f} GB, but {kv_gb:.0f} GB are left beside the weights on "
                f"{cluster.gpus_per_replica} x {self.machine}: set rollout.kv_capacity to at most "
                f"{int(kv_gb * 1e6 / self.kv_kb):,}"
            )


def memory_of(machine: str) -> float:
    """GB of one accelerator. Raises ValueError for an unknown one, with the known names."""
    if machine not in MACHINES:
        known = ", ".join(MACHINES)
        raise ValueError(f"there is no machine {machine!r}{suggest_name(machine, MACHINES)}; known: {known}")
    return MACHINES[machine]


def kv_gigabytes(machine: str, gpus: int, weights_gb: float) -> float:
    """GB of KV on a replica of `gpus` accelerators. Raises ValueError if the weights do not fit."""
    memory = USABLE * memory_of(machine) * gpus
    if weights_gb >= memory:
        raise ValueError(
            f"weights of {weights_gb:g} GB do not fit on {gpus} x {machine}, which have {memory:.0f} GB for weights "
            "and KV: use more GPUs a replica"
        )
    return memory - weights_gb
