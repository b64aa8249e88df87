"""A patch of a method that changes its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def after(patch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace method `name`: `change` receives the object, its result and its arguments, and returns another result."""
    original = getattr(owner, name)

    def changed(self: Any, *args: Any, **named: Any) -> Any:
        return change(self, original(self, *args, **named), *args, **named)

    patch.setattr(owner, name, changed)
