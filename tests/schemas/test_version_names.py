"""The names of weight versions that commands and the gateway accept."""

from __future__ import annotations

import pytest

from schemas.records import PolicyVersion
from schemas.records.versions import named_version

VERSIONS = [PolicyVersion(1, 1), PolicyVersion(1, 2), PolicyVersion(2, 2)]


@pytest.mark.parametrize(
    ("name", "found"),
    [("latest", "2.2"), ("v1", "1.1"), ("v2", "2.2"), ("1.2", "1.2"), ("v9", "None"), ("9.9", "None")],
)
def test_named_version_reads_all_forms(name: str, found: str) -> None:
    assert str(named_version(name, VERSIONS)) == found
    assert named_version(name, ()) is None


@pytest.mark.parametrize("name", ["", "v", "newest", "v1.2", "12"])
def test_named_version_rejects_other_names(name: str) -> None:
    with pytest.raises(ValueError, match=r"not a policy version: .*e\.g\. '1\.12'"):
        named_version(name, VERSIONS)
