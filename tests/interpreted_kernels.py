"""Programs that compare Triton kernels, interpreted on a CPU, with torch's operations."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def assert_equal(comparison: str) -> None:
    """Run the program `comparison`, which prints `equal` at its end, where there is Triton."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", comparison], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr
