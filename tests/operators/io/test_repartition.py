"""RepartitionTrajectories: which record a decision becomes, and in which partition of the inbox topic."""

from __future__ import annotations

import pytest
from decisions import assert_maps, kv, moved, placed, response
from record_factories import prompt

from operators.io.elements import Output
from operators.io.repartition import LiveReplicas, Placed, RepartitionTrajectories, repartition
from schemas.codec import MAX_VALUE_BYTES
from schemas.records import Assignment, AssignmentRejected, Cancel, Metric, Release, Reserve
from schemas.topics import INBOX, METRICS, PROGRESS

OTHER = Output(METRICS, "trainer", Metric("trainer", 1, {}, 0))
TOO_LONG = MAX_VALUE_BYTES // 9
CANCEL = Cancel(("p0.0",), (3,), 2, 1)


def test_repartition_routes_decisions_to_the_inbox_of_a_replica() -> None:
    reserve = Reserve("1-1.1", placed(0, 0, tokens=1).assignment.policy_version, ("p0.0",), 9, 3, 1)  # type: ignore[arg-type]
    decisions = [CANCEL, OTHER, moved("p0.0", source=2, to=3), reserve, placed(1, 3, tokens=2)]
    release = Release("1-1.1", ("p0.0",), (9,), 3, 1, 2, 1)
    records = [(CANCEL, 2), OTHER, (release, 2), (reserve, 3), (placed(1, 3, tokens=2).assignment, 3)]
    expected = [each if isinstance(each, Output) else Output(INBOX, "", *each) for each in records]
    assert_maps(RepartitionTrajectories(), [LiveReplicas({2: 1, 3: 1}), *decisions], expected)


@pytest.mark.parametrize(
    ("decision", "live", "reason", "retry"),
    [
        (placed(0, 3, incarnation=1), {3: 2}, "incarnation 1 of replica 3 is not alive", True),
        (placed(0, 3), {}, "incarnation 1 of replica 3 is not alive", True),
        (placed(0, 3, tokens=TOO_LONG), {3: 1}, "are too large for an inbox", True),
    ],
)
def test_repartition_rejects_with_a_reason(decision: Placed, live: dict[int, int], reason: str, retry: bool) -> None:
    (output,) = repartition([LiveReplicas(live), decision])
    assert (output.topic, type(output.record)) == (PROGRESS, AssignmentRejected)
    assert reason in output.record.reason
    assert (output.record.trajectory_id, output.record.lease, output.record.retry) == ("p0.0", 1, retry)


def test_repartition_rejects_a_prompt_too_large_for_good() -> None:
    (output,) = repartition([placed(0, 3, prompt=prompt(0, text="x" * MAX_VALUE_BYTES))])
    assert not output.record.retry


@pytest.mark.parametrize(("incarnation", "kept"), [(0, False), (1, True), (2, True)])
def test_repartition_drops_commands_for_a_replaced_incarnation(incarnation: int, kept: bool) -> None:
    commands = [Cancel(("p0.0",), (3,), 2, incarnation), moved("p0.0", source=2, incarnation=incarnation)]
    assert len(repartition([LiveReplicas({2: 1}), *commands])) == 2 * kept


def test_repartition_omits_kv_that_does_not_fit() -> None:
    (output,) = repartition([placed(0, 3, partial=response(2), kv=kv(MAX_VALUE_BYTES // 8))])
    assert isinstance(output.record, Assignment)
    assert output.record.kv is None
