"""Stores of the tests lie where stores of runs do."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.store.names import SHARED_MEMORY, default_root

_numbers = itertools.count(1)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A folder for a store that no other test has, in shared memory where there is any."""
    base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else tmp_path
    folder = default_root(f"test-{os.getpid()}-{next(_numbers)}", base)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
