"""Where the time of agents' requests goes, read from the log after the run, and the CPU time of each process.

Records say when they were written, and a transaction's marker when it was committed, so the processes measure nothing.
All clocks are those of one machine, in milliseconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import psutil
from kafka import TopicPartition

from infra.kafka.note import uncommitted_consumer
from infra.kafka.properties import ClientProperties
from infra.kafka.record_batches import Marker
from schemas.codec import decode
from schemas.records import Assignment, Prompt, TurnEnded, TurnRequest
from schemas.topics import INBOX, PROGRESS, PROMPTS

PLAIN = (Prompt, TurnRequest)
"""Written outside of transactions; in a run the role prompts writes prompts in transactions."""


class Call(NamedTuple):
    """A request as its agent saw it, in Unix milliseconds."""

    episode: str
    began: float
    ended: float


class Written(NamedTuple):
    """A record of the log: when its producer sent it, and when its transaction was committed (if it has one)."""

    record: Any
    sent_at: float
    committed_at: float


@dataclass
class CpuSeconds:
    """CPU seconds of processes by name, from the construction on."""

    processes: Mapping[str, int]

    def __post_init__(self) -> None:
        self._before = self._now()

    def used(self) -> dict[str, float]:
        """The seconds since the start; `agents` is this process."""
        return {name: seconds - self._before[name] for name, seconds in self._now().items()}

    def _now(self) -> dict[str, float]:
        times = {name: psutil.Process(pid).cpu_times() for name, pid in self.processes.items()}
        own = os.times()
        return {"agents": own.user + own.system} | {name: each.user + each.system for name, each in times.items()}


def stages_of(client: ClientProperties, run: str, calls: Iterable[Call]) -> dict[str, dict[str, dict[str, float]]]:
    """The stages of first and of later turns: percentiles of each in milliseconds, see `summary`, and of their sums."""
    requests: dict[str, list[Written]] = {}
    for each in written_records(client, INBOX.name(run), TurnRequest):
        of_episode = requests.setdefault(each.record.trajectory_id, [])
        if all(each.record.turn_id != known.record.turn_id for known in of_episode):  # a repetition is no new turn
            of_episode.append(each)
    ends: dict[tuple[str, str], Written] = {}
    for each in written_records(client, PROGRESS.name(run), TurnEnded):
        ends[each.record.trajectory_id, each.record.turn_id] = each
    assigned: dict[str, Written] = {}
    for each in written_records(client, INBOX.name(run), Assignment):
        assigned.setdefault(each.record.trajectory_id, each)
    prompts = {each.record.prompt_id: each for each in written_records(client, PROMPTS.name(run), Prompt)}
    first: list[dict[str, float]] = []
    later: list[dict[str, float]] = []
    turns: dict[str, int] = {}
    for call in calls:
        number = turns[call.episode] = turns.get(call.episode, -1) + 1
        request = requests[call.episode][number]
        end = ends[call.episode, request.record.turn_id]
        stages = {
            "gateway reads the request": request.record.written_at - call.began,
            "gateway sends the order": request.sent_at - request.record.written_at,
            "order reaches the rollout, engine": end.record.written_at - request.sent_at,
            "response waits for a transaction": end.sent_at - end.record.written_at,
            "transaction of the response": end.committed_at - end.sent_at,
            "gateway reads and answers": call.ended - end.committed_at,
        }
        if number:
            later.append(stages)
            continue
        prompt, assignment = prompts[call.episode.partition(".")[0]], assigned[call.episode]
        del stages["gateway reads the request"]
        first.append(
            {
                "prompt is sent": prompt.sent_at - call.began,
                "placement assigns it": assignment.record.assigned_at - prompt.sent_at,
                "assignment waits for a transaction": assignment.sent_at - assignment.record.assigned_at,
                "transaction of the assignment": assignment.committed_at - assignment.sent_at,
                "gateway reads the assignment": request.record.written_at - assignment.committed_at,
                **stages,
            }
        )
    return {"first": summary(first), "later": summary(later)}


def summary(turns: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Percentiles of each stage and of their sum. On a busy machine p5 is what the stage takes while a core is free."""
    if not turns:
        return {}
    columns = {stage: [turn[stage] for turn in turns] for stage in turns[0]}
    columns["sum"] = [sum(turn.values()) for turn in turns]
    return {stage: {f"p{at}": float(np.percentile(of, at)) for at in (5, 50, 99)} for stage, of in columns.items()}


def written_records(client: ClientProperties, topic: str, kind: type) -> Iterator[Written]:
    """The committed records of class `kind` in partition 0 of `topic`, in the order of their commits."""
    place = TopicPartition(topic, 0)
    consumer = uncommitted_consumer(client)
    open_records: dict[int, list[tuple[Any, float]]] = {}
    try:
        end = consumer.end_offsets([place])[place]
        consumer.assign([place])
        consumer.seek_to_beginning(place)
        while consumer.position(place) < end:
            for polled in consumer.poll(timeout_ms=1000).get(place, ()):
                if isinstance(polled.value, Marker):
                    rows = open_records.pop(polled.value.producer_id, [])
                    if polled.value.committed:
                        yield from (Written(row, sent_at, polled.timestamp) for row, sent_at in rows)
                    continue
                batch = polled.value
                columns = zip(batch.timestamps, batch.values, batch.headers, strict=True)
                rows = [
                    (row, sent_at)
                    for sent_at, value, headers in columns
                    for row in decode(value, headers)
                    if isinstance(row, kind)
                ]
                if kind in PLAIN:
                    yield from (Written(row, sent_at, sent_at) for row, sent_at in rows)
                else:
                    open_records.setdefault(batch.producer_id, []).extend(rows)
    finally:
        consumer.close(autocommit=False)


def table_of(stages: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """The stages as text."""
    lines = [f"{'':<40}{'p5':>8}{'p50':>8}{'p99':>8}  ms"]
    for turn, of_turn in stages.items():
        lines.append(f"{turn} turns")
        lines += [f"  {stage:<38}{of['p5']:8.1f}{of['p50']:8.1f}{of['p99']:8.1f}" for stage, of in of_turn.items()]
    return "\n".join(lines)
