"""Which versions go when there are too many, as a table."""

from __future__ import annotations

import pytest

from infra.store.weight_store import is_wanted, versions_to_evict
from schemas.records import PolicyVersion


def versions(text: str) -> list[PolicyVersion]:
    return [PolicyVersion.parse(each) for each in text.split()]


@pytest.mark.parametrize(
    ("there", "live", "keep", "evicted"),
    [
        ("1.1 1.2 1.3", "", 2, "1.1"),
        ("1.1 1.2 1.3 1.4", "1.1", 3, "1.2"),  # trajectories still run under the oldest
        ("1.1 1.2 1.3 1.4", "1.1 1.2", 3, "1.1"),  # `keep` is the bound: of the live ones the newest
        ("1.1 1.2 1.3 1.4", "1.1", 2, "1.2 1.1"),  # the newest two come first
        ("1.1 1.2", "1.1", 1, "1.1"),
        ("1.9 2.1 1.10", "", 2, "1.9"),
        ("1.1 1.2", "7.7", 4, ""),
        ("", "1.1", 2, ""),
    ],
)
def test_to_evict(there: str, live: str, keep: int, evicted: str) -> None:
    assert versions_to_evict(versions(there), set(versions(live)), keep) == versions(evicted)


@pytest.mark.parametrize(
    ("version", "here", "live", "keep", "wanted"),
    [
        ("1.1", "", "", 2, True),
        ("1.2", "1.1", "", 2, True),
        ("1.2", "1.2 1.1", "1.2", 2, False),  # it is here
        ("1.1", "1.2", "", 4, False),
        ("1.1", "1.2", "1.1", 4, True),  # trajectories run under it, elsewhere
        ("1.1", "1.5 1.4 1.3", "1.1", 3, True),  # 1.3 goes for it
        ("1.1", "1.5 1.4 1.3", "1.1 1.3", 3, False),  # 1.3 would, and is live too
        ("1.1", "1.5 1.4", "1.1", 2, False),  # it would not stay
        ("2.1", "1.9", "", 1, True),
    ],
)
def test_is_wanted(version: str, here: str, live: str, keep: int, wanted: bool) -> None:
    (number,) = versions(version)
    assert is_wanted(number, versions(here), set(versions(live)), keep) is wanted
