"""User modules named as files, and the modules beside them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.name_lookup import import_user_module


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own_helper.py").write_text(f"def value():\n    return {name!r}\n")
        (tmp_path / name / "reward.py").write_text("from own_helper import value\n")
    yield tmp_path / "a", tmp_path / "b"
    sys.modules.pop("own_helper", None)


def test_file_with_the_module_name_of_another_is_an_error(folders: tuple[Path, Path]) -> None:
    first, second = folders
    assert import_user_module(str(first / "reward.py")).value() == "a"
    with pytest.raises(
        ValueError, match=r"b/reward\.py imports own_helper, and got .*a/own_helper\.py instead of .*b/"
    ):
        import_user_module(str(second / "reward.py"))
    (second / "other.py").write_text("import json\n")
    assert import_user_module(str(second / "other.py")).json is sys.modules["json"]


def test_file_changed_within_a_second_is_read_again(tmp_path: Path) -> None:
    """With the same size and time, which is all that Python compares byte code with."""
    reward = tmp_path / "reward.py"
    for value in (1, 2):
        reward.write_text(f"VALUE = {value}\n")
        os.utime(reward, (1_700_000_000, 1_700_000_000))
        assert value == import_user_module(str(reward)).VALUE
    assert list(tmp_path.iterdir()) == [reward]
