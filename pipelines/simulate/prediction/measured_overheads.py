"""The overheads between the roles of a run, from the times in its log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median, quantiles

from infra.kafka.properties import ClientProperties
from pipelines.inspect.log.chunks import rows_of
from pipelines.simulate.prediction.cluster import Overheads
from schemas.records import Metric
from schemas.topics import EXPERIENCES, SETTLED

FEW = 3
"""Batches that are enough to measure."""
PARTS = 20
"""One of so many hops waits for nothing else: neither `rollout.linger_s` nor other trajectories."""


def measured_overheads(client: ClientProperties, run: str, metrics: Sequence[Metric]) -> Overheads | None:
    """The overheads of `run`, with its log and its trainer's `metrics`; None if it has too few batches.

    Clocks of different machines are compared, so they must agree to less than these times.
    """
    hops = [
        (row["scored_at"] - row["finished_at"]).total_seconds()
        for row in rows_of(client, run, EXPERIENCES, ("finished_at", "scored_at"))
    ]
    settled = {
        row["batch"]: row["settled_at"].timestamp()
        for row in rows_of(client, run, SETTLED, ("outcome", "batch", "settled_at"))
        if row["outcome"] == "batched"
    }
    awaited = list(_awaited(settled, metrics))
    if len(hops) < PARTS or len(awaited) < FEW:
        return None
    return Overheads(max(0.0, quantiles(hops, n=PARTS)[0]), max(0.0, median(awaited)))


def _awaited(settled: Mapping[int, float], metrics: Sequence[Metric]) -> Iterator[float]:
    """Seconds from the choice of a batch to its training, of each for which the trainer was already waiting."""
    for each in metrics:
        chosen_at = settled.get(each.step - 1)
        if each.name != "trainer" or "time/wait" not in each.values or chosen_at is None:
            continue
        began = each.measured_at / 1000 - each.values["time/update"] - each.values["weight_sync/seconds"]
        if began - each.values["time/wait"] <= chosen_at:
            yield began - chosen_at
