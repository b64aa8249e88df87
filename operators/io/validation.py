"""Which control records can be: what decodes, but no process of a run would write.

A record that cannot be is a dead letter before any step sees it. So steps may rely on columns of equal length, on
numbers that can be counted and written, and on versions that follow from their batches. Experiences, trajectories that
travel as blocks, and micro-batches are checked by the steps that read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np

from schemas import records as r
from schemas.block import Block
from schemas.identity import is_trajectory_id
from schemas.shape import fields_of

MOST = 2**53
"""No count goes beyond: JSON readers of other languages have no larger integers."""
MOST_STARTS = 10**9
"""A process that starts once a second for thirty years."""
MOST_MEMBERS = 65_536
"""Samples of one prompt."""
MOST_BATCHES_APART = 1000
"""Batches that the trainer may take between two versions that it publishes."""
MOST_STARTS_APART = 10_000
"""Starts of the trainer that may publish nothing."""
LAST_MS = 253_402_300_799_999
"""The end of the year 9999 in Unix milliseconds: the last time that can be printed."""
_BOUNDS: Mapping[str, tuple[int, int]] = {
    "incarnation": (0, MOST_STARTS),
    "destination_incarnation": (0, MOST_STARTS),
    "epoch": (0, MOST_STARTS),
    "replica": (-1, 10**6),  # -1: none, where placement itself ends a trajectory
    "destination": (0, 10**6),
    "relay": (0, 10**6),
    "process": (0, 10**6),
    "shard": (0, 10**6),
    "samples": (1, MOST_MEMBERS),
    "group_size": (1, MOST_MEMBERS),
    "member": (0, MOST_MEMBERS - 1),
    "level": (0, 10**6),
    "groups": (-MOST, MOST),  # imported ones go down from -1
    "seed": (-(2**63), 2**63 - 1),
}
_UNBOUNDED = (r.DeadLetter, r.MicroBatch)
_ROW_BOUNDS = {"prompt.number": MOST, "member": MOST_MEMBERS - 1, "prompt.samples": MOST_MEMBERS}


def invalid_reason(record: Any) -> str | None:
    """Why no process of a run would write `record`; None: one may."""
    kind = type(record)
    if kind in _UNBOUNDED:
        return None
    return next(_absurd_numbers(record), None) or next(_CONTRADICTIONS.get(kind, _none)(record), None)


def invalid_rows(block: Block) -> list[int]:
    """The rows of `block`, of trajectories or experiences, that no process of a run would write."""
    if block.kind not in (r.Trajectory, r.Experience):
        return []
    of = "trajectory." if block.kind is r.Experience else ""
    columns = {name: block.column(of + name).to_numpy() for name in _ROW_BOUNDS}
    wrong = columns["member"] >= columns["prompt.samples"]
    for name, most in _ROW_BOUNDS.items():
        wrong |= (columns[name] < 0) | (columns[name] > most)
    found: list[int] = np.flatnonzero(wrong).tolist()
    return found


def _absurd_numbers(record: Any) -> Iterator[str]:
    """The integers of `record`, and of the records in it, that are out of their range."""
    kind: Any = type(record)
    for name, many, nested, low, high in _numbers(kind):
        value = getattr(record, name)
        if value is None:
            continue
        for each in value if many else (value,):
            if nested:
                yield from (f"{name}: {reason}" for reason in _absurd_numbers(each))
            elif not low <= each <= high:
                yield f"{name} is {each}, which is not between {low} and {high}"


@cache
def _numbers(kind: Any) -> tuple[tuple[str, bool, bool, int, int], ...]:
    """The fields of `kind` with integers, or with records: name, whether they hold several, records, and the range."""
    found = []
    for field in fields_of(kind):
        nested = hasattr(field.of, "__dataclass_fields__")
        if field.kind in ("scalar", "tuple", "record") and (nested or field.of is int):
            low, high = (0, LAST_MS) if field.name.endswith("_at") else _BOUNDS.get(field.name, (0, MOST))
            found.append((field.name, field.kind == "tuple", nested, low, high))
    return tuple(found)


class ManifestOrder:
    """The manifests of a start, in the order of the log: which of them can follow those before."""

    def __init__(self) -> None:
        self._epoch = self._number = -1

    def invalid_reason(self, manifest: r.WeightVersion) -> str | None:
        """Why no trainer would publish `manifest` after those that were taken; None: it is taken."""
        (epoch, number), parent = (manifest.version.epoch, manifest.version.number), manifest.parent
        if self._number >= 0:
            if parent is not None and parent.number > self._number:
                return f"version {manifest.version} has parent {parent}, and none beyond {self._number} was published"
            if number > self._number + MOST_BATCHES_APART or epoch > self._epoch + MOST_STARTS_APART:
                return f"version {manifest.version} is far ahead of {self._epoch}.{self._number}, the newest before"
        self._epoch, self._number = max(self._epoch, epoch), max(self._number, number)
        return None


def _version(manifest: r.WeightVersion) -> Iterator[str]:
    before = 0 if manifest.parent is None else manifest.parent.number
    if manifest.parent is not None and not manifest.parent < manifest.version:
        yield f"version {manifest.version} does not follow its parent {manifest.parent}"
    taken, batches = manifest.version.number - before, manifest.batches  # one batch makes one version
    by_hand = taken in (0, 1) and not batches  # `laminar weights publish`
    if not by_hand and (taken != len(batches) or batches != tuple(range(before, before + taken))):
        yield f"version {manifest.version} is not made of its parent {manifest.parent} by batches {_few(batches)}"
    if not set(manifest.untrained_batches) <= set(manifest.batches):
        yield f"untrained batches {_few(manifest.untrained_batches)} are not among its batches"


def _chain(chain: r.RelayChain) -> Iterator[str]:
    relays = [link.relay for link in chain.links]
    if len(set(relays)) < len(relays) or not set(chain.joining) <= set(relays):
        yield f"relays {_few(relays)} with {_few(chain.joining)} joining are no chain"
    if chain.schedule not in ("chain", "tree", "binomial"):
        yield f"there is no relay schedule {chain.schedule[:40]!r}"
    for link in chain.links:
        if (reason := _no_address(link.address)) is not None:
            yield f"relay {link.relay}: {reason}"


def _replica(status: r.ReplicaStatus) -> Iterator[str]:
    if status.replica < 0:
        yield f"there is no replica {status.replica}"
    if not 0 <= status.step_seconds < MOST:
        yield f"an engine step of {status.step_seconds} s"


def _relay(status: r.RelayStatus) -> Iterator[str]:
    for text in status.versions:
        try:
            r.PolicyVersion.parse(text)
        except ValueError as error:
            yield str(error)
    if status.address and (reason := _no_address(status.address)) is not None:
        yield reason


def _settled(settled: r.Settled) -> Iterator[str]:
    if not is_trajectory_id(settled.trajectory_id):
        yield f"not a trajectory id: {settled.trajectory_id[:80]!r}"
    elif (settled.outcome in ("batched", "imported")) != (settled.batch is not None):
        yield f"{settled.trajectory_id} is {settled.outcome} with batch {settled.batch}"


def _named(record: r.Progress | r.AssignmentRejected | r.TrajectoryClosed) -> Iterator[str]:
    if not is_trajectory_id(record.trajectory_id):
        yield f"not a trajectory id: {record.trajectory_id[:80]!r}"


def _progress(record: r.Progress) -> Iterator[str]:
    yield from _named(record)
    counts = {len(column) for column in (record.gained.token_ids, record.gained.logprobs, record.gained.loss_mask)}
    if len(counts) > 1 or sum(span.length for span in record.version_spans) not in counts:
        yield f"{record.trajectory_id}: tokens, logprobs, mask and version spans do not agree"


def _assignment(record: r.Assignment) -> Iterator[str]:
    yield from _prompt(record.prompt)
    partial = record.partial
    if partial is not None:
        counts = {len(column) for column in (partial.token_ids, partial.logprobs, partial.loss_mask)}
        if len(counts) > 1 or sum(span.length for span in record.version_spans) not in counts:
            yield f"{record.trajectory_id}: tokens, logprobs, mask and version spans do not agree"


def _prompt(prompt: r.Prompt) -> Iterator[str]:
    if not len(prompt.token_ids):
        yield f"{prompt.prompt_id}: the prompt is empty"
    sampling = prompt.sampling
    if not (0 <= sampling.temperature < MOST and 0 <= sampling.top_p <= 1):
        yield f"{prompt.prompt_id}: drawn at temperature {sampling.temperature} with top_p {sampling.top_p}"


def _leases(order: r.Cancel | r.Release) -> Iterator[str]:
    if len(order.leases) != len(order.trajectory_ids):
        yield f"{len(order.trajectory_ids)} trajectories with {len(order.leases)} leases"


def _offered(offered: r.BatchProposal) -> Iterator[str]:
    if len(offered.groups) != len(offered.sizes):
        yield f"{len(offered.groups)} groups with {len(offered.sizes)} sizes"
    if any(not 1 <= size <= MOST_MEMBERS for size in offered.sizes):
        yield f"groups of {_few(offered.sizes)} trajectories"


def _told(told: r.LevelSuccess) -> Iterator[str]:
    if not len(told.tasks) == len(told.correct) == len(told.answered):
        yield f"{len(told.tasks)} tasks with {len(told.correct)} and {len(told.answered)} figures"
    elif any(not 0 <= right <= answered for right, answered in zip(told.correct, told.answered, strict=True)):
        yield "more right answers than answers"


def _no_address(text: str) -> str | None:
    host, colon, port = text.rpartition(":")
    fits = colon and host and port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65_536
    return None if fits else f"{text[:80]!r} is no address (host:port)"


def _few(numbers: Any) -> str:
    found = list(numbers[:4])
    return f"{found}{f' and {len(numbers) - 4} more' if len(numbers) > 4 else ''}"


def _none(record: Any) -> Iterator[str]:
    yield from ()


_CONTRADICTIONS: Mapping[type, Callable[[Any], Iterator[str]]] = {
    r.WeightVersion: _version,
    r.RelayChain: _chain,
    r.ReplicaStatus: _replica,
    r.RelayStatus: _relay,
    r.Settled: _settled,
    r.Progress: _progress,
    r.AssignmentRejected: _named,
    r.TrajectoryClosed: _named,
    r.Prompt: _prompt,
    r.Assignment: _assignment,
    r.Cancel: _leases,
    r.Release: _leases,
    r.BatchProposal: _offered,
    r.LevelSuccess: _told,
}
