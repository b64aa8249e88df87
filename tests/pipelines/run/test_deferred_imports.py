"""Modules that are imported when they are first used."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.run.zygote import UNUSED, DeferredModule, defer_imports, import_role_modules
from schemas.hidden_modules import hidden_modules

NAME = "a_module_of_this_test"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that can be imported; importing it defines VALUE."""
    package = tmp_path / NAME
    package.mkdir()
    (package / "__init__.py").write_text("VALUE = 7\n")
    (package / "part.py").write_text("OTHER = 8\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield NAME
    for name in (NAME, f"{NAME}.part"):
        sys.modules.pop(name, None)


def is_imported(name: str) -> bool:
    return not isinstance(sys.modules[name], DeferredModule)


def test_deferred_module_is_imported_when_it_is_first_used(module: str) -> None:
    defer_imports([module])
    found = importlib.import_module(module)
    assert not is_imported(module)
    assert (found.VALUE, is_imported(module)) == (7, True)
    assert importlib.import_module(module).VALUE == found.VALUE


def test_inspection_of_modules_imports_no_deferred_one(module: str) -> None:
    defer_imports([module])
    assert inspect.getmodule(test_inspection_of_modules_imports_no_deferred_one) is not None
    assert not any(hasattr(sys.modules[module], name) for name in ("__wrapped__", "__warningregistry__"))
    assert not is_imported(module)


def test_part_of_a_deferred_package_can_be_imported(module: str) -> None:
    defer_imports([module])
    assert importlib.import_module(f"{module}.part").OTHER == 8
    assert is_imported(module)


def test_imported_and_missing_modules_are_not_deferred(module: str) -> None:
    imported = importlib.import_module(module)
    defer_imports([module, "a_module_that_does_not_exist"])
    assert sys.modules[module] is imported
    assert "a_module_that_does_not_exist" not in sys.modules


def test_hidden_module_can_be_imported_afterwards(module: str) -> None:
    with hidden_modules([module, "json"]):
        with pytest.raises(ImportError):
            importlib.import_module(module)
        assert importlib.import_module("json") is json
    assert importlib.import_module(module).VALUE == 7


def test_roles_are_imported_with_unused_modules_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr("pipelines.run.zygote._TRAINING_MODULES", ())
    monkeypatch.setattr("pipelines.run.zygote.defer_imports", lambda: imported.extend(UNUSED))
    monkeypatch.setattr("threading.active_count", lambda: 1)  # this process may have threads of other tests
    import_role_modules()
    assert imported == ["cellpylib"]
