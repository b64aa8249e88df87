"""The name of this machine, by which processes recognise that they share its memory, and who uses it."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "LAMINAR_MACHINE"
"""The environment variable that names the machine: in a container, the host name is the container's."""
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
