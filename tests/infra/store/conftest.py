"""Fixtures of weight stores."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.store.names import SHARED_MEMORY, default_root
from infra.store.weight_store import WeightStore
from schemas.records import PolicyVersion

_numbers = itertools.count(1)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """The folder of a store for this test, in shared memory if available."""
    base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else tmp_path
    folder = default_root(f"test-{os.getpid()}-{next(_numbers)}", base)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[WeightStore]:
    """A store with the versions 1.1 to 1.4; the bytes of each are its number."""
    with WeightStore(tmp_path / "store") as opened:
        for number in range(1, 5):
            with opened.begin(PolicyVersion(1, number), 1000) as arriving:
                arriving.view[:] = bytes([number]) * 1000
                arriving.seal()
        yield opened
