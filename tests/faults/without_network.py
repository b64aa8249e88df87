"""Skips tests where network namespaces cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from faults.network import NoNetwork


@contextmanager
def skipped_without_network() -> Iterator[None]:
    """In this context: skip the test, with the reason, if its network cannot be made."""
    try:
        yield
    except NoNetwork as reason:
        pytest.skip(str(reason))
