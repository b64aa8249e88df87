"""benchmarks/moves.py: outcomes and times of planned moves, on a log with known results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from record_samples import PROMPT, SAMPLES

from benchmarks.moves import moves_in
from infra.kafka.topic_reader import StoredRecord
from schemas.columns import flags, floats, token_ids
from schemas.records import (
    Assignment,
    NextOwner,
    PlannedMove,
    PolicyVersion,
    Progress,
    Release,
    RepackPlan,
    ReplicaStatus,
    Reserve,
    Response,
)

VERSION = PolicyVersion(1, 0)


def stored(timestamp: int, *rows: Any) -> StoredRecord:
    return StoredRecord("a topic", 0, 0, timestamp, None, (), 0, rows, None)


def progress(name: str, lease: int, at: int, tokens: int = 0, **changes: Any) -> Progress:
    gained = Response(token_ids([1] * tokens), floats([0.0] * tokens), flags([True] * tokens))
    fields = {"next_owner": None, "first_token_at": None, **changes}
    return Progress(name, lease, 1, 0, 1, 0, gained, (), fields["next_owner"], fields["first_token_at"], at)


def assignment(number: int, lease: int) -> Assignment:
    return Assignment(replace(PROMPT, number=number), 0, lease, 1, 1, 1, VERSION, None, 0)


def test_moves_report_the_plans_first_resumed_token() -> None:
    """Two moves have tokens and one has none; the first hand-over is not the first to resume."""
    names, leases = ("p0.0", "p1.0", "p2.0"), (7, 8, 9)
    plan = RepackPlan("1-1", VERSION, (PlannedMove(0, 1, names, 10),), (), (), "repack", 1000)
    statuses = [replace(SAMPLES[ReplicaStatus], reserved=("1-1.1",), sent_at=at) for at in (1300, 1090)]
    owners = [NextOwner(lease, 1, 1) for lease in leases]
    moves = moves_in(
        [
            stored(1020, plan),
            stored(1030, Reserve("1-1.1", VERSION, names, 10, 1, 1)),
            stored(1100, *statuses),
            stored(1150, Release("1-1.1", names, leases, 1, 1, 0, 1)),
            stored(1200, progress("p0.0", 1, 1190, 5, next_owner=owners[0])),
            stored(
                1200,
                progress("p1.0", 1, 1195, 5, next_owner=owners[1]),
                progress("p2.0", 1, 1195, next_owner=owners[2]),
            ),
            stored(1210, assignment(0, 7), assignment(1, 8), assignment(2, 9)),
            stored(1900, progress("p0.0", 7, 1900, 9, first_token_at=1800)),
            stored(1900, progress("p1.0", 8, 1900, 9, first_token_at=1500)),
            stored(1950, progress("p1.0", 8, 1950, 9, first_token_at=1501)),
            stored(1900, progress("p2.0", 9, 1900, 9, first_token_at=1250)),  # it had no tokens to resume
        ]
    )
    assert (moves.planned, moves.moved, moves.without_tokens, moves.plans) == (3, 3, 1, 1)
    assert moves.hand_over_s == pytest.approx(0.1925)
    assert moves.resumed_s == pytest.approx((0.5 + 0.8) / 2)
    assert moves.plan_resumed_s == pytest.approx(0.5)
    steps = {
        "requested": 0.03,
        "reserved": 0.06,
        "released": 0.06,
        "handed_over": 0.045,
        "assigned": 0.015,
        "resumed": 0.29,
    }
    assert moves.steps_s == pytest.approx(steps)
    assert sum(moves.steps_s.values()) == pytest.approx(moves.plan_resumed_s)
