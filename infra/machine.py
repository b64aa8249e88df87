"""The name of this machine, by which processes recognise that they share its memory."""

from __future__ import annotations

import os

VARIABLE = "LAMINAR_MACHINE"
"""The environment variable that names the machine: in a container, the host name is the container's."""


def machine_name() -> str:
    """The value of `VARIABLE`, else the host name."""
    return os.environ.get(VARIABLE) or os.uname().nodename
