"""The name of this machine, by which processes recognise that they share its memory, who uses it, and its GPUs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "LAMINAR_MACHINE"
"""The environment variable that names the machine: in a container, the host name is the container's."""
GATEWAY_URL = "LAMINAR_GATEWAY_URL"
"""The environment variable with the URL of the run's gateway, in containers, which share no folder to find it in."""
_LOGIN_FILE = Path("/proc/self/loginuid")
_NO_LOGIN = (1 << 32) - 1


def machine_name() -> str:
    """The value of `VARIABLE`, else the host name."""
    return os.environ.get(VARIABLE) or os.uname().nodename


def login_user() -> int | None:
    """The id of the user who logged in, also where they became root with sudo or su; None if it is not known."""
    try:
        login = int(_LOGIN_FILE.read_text())
    except (OSError, ValueError):  # a kernel without auditing
        login = _NO_LOGIN
    if login != _NO_LOGIN:
        return login
    sudo = os.environ.get("SUDO_UID", "")
    return int(sudo) if sudo.isdecimal() else None


def gpu_names() -> tuple[str, ...]:
    """Name and memory of each NVIDIA GPU; empty without a driver."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())


def check_gpu_list(name: str, gpus: Sequence[int]) -> None:
    """Raise ValueError, naming the setting `name`, unless `gpus` are different numbers of GPUs."""
    if len(set(gpus)) < len(gpus) or any(gpu < 0 for gpu in gpus):
        raise ValueError(f"{name} must be different numbers of GPUs, from 0 on, not {list(gpus)}")


def visible_gpus() -> tuple[str, ...]:
    """The identifiers of the GPUs that this process may use, as in `CUDA_VISIBLE_DEVICES`."""
    count = len(gpu_names())
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return tuple(map(str, range(count)))
    return tuple(name for each in named.split(",") if (name := each.strip()) and name != "-1") if count else ()
