"""A sign of life for whoever looks after processes: a file that a working source touches.

Where LAMINAR_ALIVE_FILE is set, the file appears once the shard is open and is touched as it polls. A probe of a
container looks at its age, which costs nothing.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

VARIABLE = "LAMINAR_ALIVE_FILE"
EVERY_S = 5.0


class SignOfLife:
    """Touches the file that the environment names, seldom; does nothing where it names none."""

    def __init__(self) -> None:
        named = os.environ.get(VARIABLE)
        self._file = Path(named) if named else None
        self._due = 0.0

    def give(self) -> None:
        """The source works."""
        if self._file is not None and time.monotonic() >= self._due:
            self._due = time.monotonic() + EVERY_S
            self._file.touch()
