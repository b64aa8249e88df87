"""The memory of known accelerators, and the KV that is left of it beside the weights."""

from __future__ import annotations

from infra.name_lookup import suggest_name

MACHINES = {"A100-40": 40.0, "A100": 80.0, "H100": 80.0, "H800": 80.0, "H200": 141.0, "B200": 192.0, "L40S": 48.0}
"""GB of one accelerator."""
USABLE = 0.9
"""Share of the memory for weights and KV; the rest is for activations and the library."""


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
