"""The domain columns that `laminar topics tail` shows beside each row."""

from __future__ import annotations

from typing import Any

import pytest
from record_samples import SAMPLES

from pipelines.present.record_text import DOMAIN, domain_of, domain_text
from schemas import records as r
from schemas.plain import to_plain

NOTHING = dict.fromkeys(DOMAIN)


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (r.Trajectory, {"trajectory": "p12.3", "version": "2.17", "staleness": 1, "tokens": 3, "lease": 5}),
        (
            r.Experience,
            {"trajectory": "p12.3", "version": "2.17", "staleness": 1, "reward": 0.75, "tokens": 3, "lease": 5},
        ),
        (r.Assignment, {"trajectory": "p12.3", "version": "2.17", "tokens": 3, "lease": 5}),
        (r.Progress, {"trajectory": "p12.3", "version": "2.17", "tokens": 3, "lease": 5}),
        (r.AssignmentRejected, {"trajectory": "p12.3", "lease": 5}),
        (r.Settled, {"trajectory": "p12.3", "staleness": 1, "tokens": 3}),
        (r.Release, {}),
        (r.MicroBatch, {"trajectory": "p12.3", "tokens": 7}),
        (r.WeightVersion, {"version": "2.17"}),
        (r.ReplicaStatus, {"version": "2.17"}),
        (r.Metric, {}),
        (r.DeadLetter, {}),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_domain_columns_of_record_types(kind: Any, found: dict[str, Any]) -> None:
    assert domain_of(to_plain(SAMPLES[kind])) == NOTHING | found


@pytest.mark.parametrize("kind", r.RECORDS, ids=lambda kind: kind.__name__)
def test_domain_columns_exist_for_every_record_type(kind: type) -> None:
    if kind in SAMPLES:
        row = to_plain(SAMPLES[kind])
        assert domain_of(row).keys() == DOMAIN.keys()
        assert domain_text(row) == "" or domain_text(row).startswith("[")


def test_domain_text_of_experience() -> None:
    text = domain_text(to_plain(SAMPLES[r.Experience]))
    assert text == "[p12.3, v2.17, staleness 1, reward 0.75, tokens 3, lease 5] "
