"""The stages of the gateway's benchmark: percentiles of each, and of their sums."""

from __future__ import annotations

from benchmarks.gateway_stages import summary, table_of


def test_summary_has_percentiles_of_stages_and_of_sums() -> None:
    found = summary([{"order": 1.0, "transaction": 9.0}, {"order": 3.0, "transaction": 5.0}])
    assert (found["order"]["p50"], found["transaction"]["p50"], found["sum"]["p50"]) == (2.0, 7.0, 9.0)
    assert summary([]) == {}


def test_table_has_a_line_for_each_stage() -> None:
    table = table_of({"later": summary([{"order": 1.0, "transaction": 9.0}])})
    assert [line.split()[0] for line in table.splitlines()[1:]] == ["later", "order", "transaction", "sum"]
