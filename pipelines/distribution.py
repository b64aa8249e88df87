"""The Python package: its name, its version, its command, and how its extras are installed."""

from __future__ import annotations

import sys

NAME = "laminar-rl"
PYTHON = (sys.executable, "-P")
"""Python for child processes, with this module path: the working directory is not a part of it."""
LAMINAR = (*PYTHON, "-c", "from pipelines.cli.main import main; main()")
"""The command `laminar` for child processes: it need not be on PATH."""


def version() -> str:
    """The version of the installed package."""
    from importlib import metadata  # here: every command imports this module

    return metadata.version(NAME)


def install_extra(extra: str) -> str:
    """How `extra` is installed: from a checkout or a wheel, because the package is in no registry."""
    return f"pip install '.[{extra}]' in a checkout of Laminar, or 'WHEEL[{extra}]' with its wheel"
