"""benchmarks/kafka_requests.py: figures by batch and by second."""

from __future__ import annotations

from collections import Counter

from benchmarks.kafka_requests import TRANSACTIONS, figures


def test_figures_count_requests_by_batch_and_by_second() -> None:
    """Transactions are not requests."""
    counts = Counter({"Fetch": 300, "Produce": 100, f"{TRANSACTIONS}score": 50, f"{TRANSACTIONS}trainer": 30})
    assert figures(counts, batches=100, seconds=200.0) == {
        "batches": 100,
        "seconds_a_batch": 2.0,
        "requests_a_batch": {"Fetch": 3.0, "Produce": 1.0},
        "all": 4.0,
        "requests_a_second": 2.0,
        "transactions_a_batch": {"score": 0.5, "trainer": 0.3},
        "transactions_a_second": 0.4,
    }
