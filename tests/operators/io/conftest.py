"""Tests that take `runner` run on each runner that this machine has."""

from __future__ import annotations

import pytest
from runners_here import RUNNERS_HERE


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "runner" in metafunc.fixturenames:
        metafunc.parametrize("runner", RUNNERS_HERE)
