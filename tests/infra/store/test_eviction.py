"""Which versions are evicted or fetched, as tables."""

from __future__ import annotations

import pytest

from infra.store.weight_store import is_wanted, versions_to_evict
from schemas.records import PolicyVersion


def versions(text: str) -> list[PolicyVersion]:
    return [PolicyVersion.parse(each) for each in text.split()]


@pytest.mark.parametrize(
    ("stored", "live", "keep", "evicted"),
    [
        ("1.1 1.2 1.3", "", 2, "1.1"),
        ("1.1 1.2 1.3 1.4", "1.1", 3, "1.2"),  # the oldest is live
        ("1.1 1.2 1.3 1.4", "1.1 1.2", 3, "1.2"),  # `keep` is the limit: the first of the live ones
        ("1.1 1.2 1.3 1.4", "1.1", 2, "1.2 1.1"),  # the newest two come first
        ("1.1 1.2", "1.1", 1, "1.1"),
        ("1.9 2.1 1.10", "", 2, "1.9"),
        ("1.1 1.2", "7.7", 4, ""),
        ("", "1.1", 2, ""),
    ],
)
def test_versions_to_evict(stored: str, live: str, keep: int, evicted: str) -> None:
    assert versions_to_evict(versions(stored), versions(live), keep) == versions(evicted)


@pytest.mark.parametrize(
    ("version", "stored", "live", "keep", "wanted"),
    [
        ("1.1", "", "", 2, True),
        ("1.2", "1.1", "", 2, True),
        ("1.2", "1.2 1.1", "1.2", 2, False),  # already stored
        ("1.1", "1.2", "", 4, False),
        ("1.1", "1.2", "1.1", 4, True),  # live elsewhere
        ("1.1", "1.5 1.4 1.3", "1.1", 3, True),  # 1.3 is evicted instead
        ("1.1", "1.5 1.4 1.3", "1.1 1.3", 3, False),  # 1.3 would be evicted, but is live
        ("1.1", "1.5 1.4", "1.1", 2, False),  # it would be evicted
        ("2.1", "1.9", "", 1, True),
    ],
)
def test_is_wanted(version: str, stored: str, live: str, keep: int, wanted: bool) -> None:
    (number,) = versions(version)
    assert is_wanted(number, versions(stored), versions(live), keep) is wanted
