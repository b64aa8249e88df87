"""Properties of the re-partitioning, for any decisions: in order, within the size bounds."""

from __future__ import annotations

from typing import Any

from decision_strategies import DECISIONS, LIVE
from decisions import placed
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.io.coalesce import coalesce
from operators.io.repartition import LiveReplicas, repartition
from schemas.codec import MAX_VALUE_BYTES
from schemas.records import Assignment
from schemas.topics import inbox_partition


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0, 3, MAX_VALUE_BYTES // 9])), max_size=12))
def test_inbox_of_a_replica_keeps_the_order_of_its_decisions(sizes: list[tuple[int, int]]) -> None:
    decisions = [placed(n, replica, n + 1, LIVE[replica], tokens) for n, (replica, tokens) in enumerate(sizes)]
    made = (output.record for output in repartition([LiveReplicas(LIVE), *decisions]))
    assigned = [each for each in made if isinstance(each, Assignment)]
    for replica in LIVE:
        fitting = [n for n, (to, tokens) in enumerate(sizes) if to == replica and tokens <= 3]
        assert [each.prompt.number for each in assigned if each.replica == replica] == fitting


@settings(deadline=None, max_examples=30)
@given(DECISIONS)
def test_encoded_inbox_records_are_within_the_bounds(decisions: list[Any]) -> None:
    outputs = repartition([LiveReplicas(LIVE), *decisions])
    for record in coalesce(outputs, lambda topic: topic.name("run")):
        assert len(record.value) <= MAX_VALUE_BYTES
    assert all(o.partition == inbox_partition(o.record.replica) for o in outputs if o.topic.short_name == "inbox")
