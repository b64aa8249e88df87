"""The overheads between the roles of a run, from the times in its log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from infra.kafka.properties import ClientProperties
from pipelines.inspect.log.chunks import rows_of
from pipelines.simulate.prediction.cluster import Overheads
from schemas.records import Metric
from schemas.topics import EXPERIENCES, SETTLED

FEW = 3
"""Batches that are enough to measure."""


def measured_overheads(client: ClientProperties, run: str, metrics: Sequence[Metric]) -> Overheads | None:
    """The overheads of `run`, with its log and its trainer's `metrics`; None if it has too few batches.

    A hop is the median time from the last score of a batch to the choice of the batch, which nothing else delays.
    Clocks of different machines are compared, so they must agree to less than these times.
    """
    batches = {
        row["trajectory_id"]: (row["batch"], row["settled_at"].timestamp())
        for row in rows_of(client, run, SETTLED, ("trajectory_id", "outcome", "batch", "settled_at"))
        if row["outcome"] == "batched"
    }
    complete: dict[int, float] = {}
    for row in rows_of(client, run, EXPERIENCES, ("trajectory_id", "scored_at")):
        number, _ = batches.get(row["trajectory_id"], (None, 0.0))
        if number is not None:
            complete[number] = max(complete.get(number, 0.0), row["scored_at"].timestamp())
    chosen = dict(batches.values())
    hops = [chosen[number] - at for number, at in complete.items()]
    awaited = list(_awaited(chosen, metrics))
    if len(hops) < FEW or len(awaited) < FEW:
        return None
    return Overheads(max(0.0, median(hops)), max(0.0, median(awaited)))


def _awaited(chosen: Mapping[int, float], metrics: Sequence[Metric]) -> Iterator[float]:
    """Seconds from the choice of a batch to its training, of each for which the trainer was already waiting."""
    for each in metrics:
        chosen_at = chosen.get(each.step - 1)
        if each.name != "trainer" or "time/wait" not in each.values or chosen_at is None:
            continue
        began = each.measured_at / 1000 - each.values["time/update"] - each.values["weight_sync/seconds"]
        if began - each.values["time/wait"] <= chosen_at:
            yield began - chosen_at
