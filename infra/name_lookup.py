"""Names in a user's configuration: importing the user's modules, and suggestions for misspelt names."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

_MAX_LISTED = 8
"""Members of a user's module that an error lists."""


class _Source(SourceFileLoader):
    """Compiles the file at each import, and keeps no byte code.

    Python's byte code is compared with its file by size and by the second of its change, so after a fast edit the old
    function would run, as a traceback with the new lines.
    """

    def path_stats(self, path: str) -> NoReturn:
        raise OSError("no byte code")  # see importlib.abc.SourceLoader


def import_user_module(name: str) -> Any:
    """Import `package.module` or `path/to/file.py`, which may import modules beside it.

    Raises ValueError if there is no such module or file.
    """
    if not name.endswith(".py"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # a module that it imports
            file = Path(*name.split(".")).with_suffix(".py")
            there = f"; for the file in this directory write {file}" if file.is_file() else "; or name a file, as my.py"
            raise ValueError(f"there is no module {error.name!r} in Python's path{there}") from None
    path = Path(name).expanduser().resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path, loader=_Source(path.stem, str(path)))
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"there is no file {path}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last: a file beside it must not replace an installed module
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _refuse_other_neighbours(path, module)
    return module


def _refuse_other_neighbours(path: Path, module: Any) -> None:
    """Raise ValueError if `module` has imported a module from elsewhere that has the name of one beside `path`."""
    members = vars(module).values()
    for name in {str(getattr(each, "__module__", None) or getattr(each, "__name__", "")) for each in members}:
        beside, loaded = path.parent / f"{name}.py", sys.modules.get(name)
        found = getattr(loaded, "__file__", None)
        if found is not None and beside != path and beside.is_file() and not beside.samefile(found):
            raise ValueError(f"{path} imports {name}, and got {found} instead of {beside}: rename one of them")


def member_of(module_name: str, name: str, kind: str, is_kind: Callable[[Any], bool]) -> Any:
    """Member `name` of a user's module, which must be a `kind` ("class", "function"): `is_kind` returns True.

    Raises ValueError, which suggests the module's own member with the nearest name, and what its import raises.
    """
    module = import_user_module(module_name)
    found = getattr(module, name, None)
    if is_kind(found):
        return found
    own = [
        each
        for each, value in vars(module).items()
        if is_kind(value) and getattr(value, "__module__", None) == module.__name__
    ]
    hint = suggest_name(name, own, _MAX_LISTED) if own else ""
    raise ValueError(f"{module_name} has no {kind} {name!r}{hint}")


def load_class(key: str, name: str, base: type[T]) -> type[T]:
    """The class `name`, "module:Class", that setting `key` names. Raises ValueError unless it derives from `base`."""
    module_name, _, class_name = name.rpartition(":")
    try:
        found = getattr(import_user_module(module_name), class_name, None)
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(f"{key}: {name!r} cannot be loaded: {error}") from error
    if not isinstance(found, type) or not issubclass(found, base):
        raise ValueError(f"{key}: {name!r} must be a class that derives from {base.__module__}.{base.__qualname__}")
    return found


def suggest_name(name: str, valid: Iterable[str], max_listed: int | None = None) -> str:
    """The end of an error about an unknown `name`: the closest valid name, or all if they are at most `max_listed`."""
    known = list(valid)
    if near := nearest_name(name, known):
        return f"; did you mean {near!r}?"
    return f"; it must be one of {sorted(known)}" if max_listed is None or len(known) <= max_listed else ""


def nearest_name(name: str, valid: Iterable[str]) -> str:
    """The one of `valid` that `name` probably means; empty if none is close."""
    return next(iter(difflib.get_close_matches(name, list(valid), n=1)), "")
