"""A liveness report without the counters and folds of other tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def clean_liveness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from infra.runners.liveness import LIVENESS  # here: a conftest is imported before the filters of warnings are set
    from operators.io.fold_records import close_folds

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    LIVENESS.clear()
    yield
    close_folds()
    LIVENESS.clear()
