"""A fixture for weight stores in shared memory."""

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
    """The folder of a store for this test, in shared memory if available."""
    base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else tmp_path
    folder = default_root(f"test-{os.getpid()}-{next(_numbers)}", base)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
