"""Which GPUs this machine has, asked of NVIDIA's driver: torch takes seconds to import."""

from __future__ import annotations

import os
import subprocess


def gpu_names() -> tuple[str, ...]:
    """NVIDIA's GPUs by name and memory; none without a driver."""
    words = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them."""
    count = len(gpu_names())
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return tuple(map(str, range(count)))
    return tuple(name for each in named.split(",") if (name := each.strip()) and name != "-1") if count else ()
