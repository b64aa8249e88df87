"""The partial response pool: the fold of the Progress of unfinished trajectories.

A delta is stored as received, and joined with others only when a replica resumes from it. Leases alone decide which
deltas count, so records that are repeated, late, or from a replaced owner have no effect.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from schemas.records import PolicyVersion, Progress, Response, VersionSpan


@dataclass(frozen=True, slots=True)
class PooledPartial:
    """The partial response of a trajectory and the versions that generated it; the spans cover all its tokens."""

    response: Response
    version_spans: tuple[VersionSpan, ...]

    def __len__(self) -> int:
        return len(self.response.token_ids)

    @property
    def version(self) -> PolicyVersion | None:
        """The version that generated all tokens; None if there are several."""
        versions = {span.version for span in self.version_spans}
        return versions.pop() if len(versions) == 1 else None


@dataclass(slots=True)
class _Entry:
    lease: int
    base: int = 0
    length: int = 0
    broken: bool = False
    chunks: list[tuple[Response, tuple[VersionSpan, ...]]] = field(default_factory=list)

    def truncate(self, length: int) -> None:
        while self.length > length:
            response, spans = self.chunks.pop()
            size = len(response.token_ids)
            keep = max(0, length - (self.length - size))
            self.length -= size - keep
            if keep:
                self.chunks.append((_slice(response, 0, keep), cut_spans(spans, 0, keep)))

    def append(self, response: Response, spans: tuple[VersionSpan, ...]) -> None:
        if len(response.token_ids):
            self.chunks.append((response, spans))
            self.length += len(response.token_ids)


class PartialPool:
    """Partial responses by trajectory id. A trajectory without Progress has no entry."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def lease(self, name: str) -> int:
        """The latest lease of `name`; 0 if it has no entry."""
        entry = self._entries.get(name)
        return 0 if entry is None else entry.lease

    def start_lease(self, name: str, lease: int, partial: PooledPartial | None) -> None:
        """The owner under `lease` starts from `partial`; later records of earlier owners do not count."""
        entry = self._entries[name] = _Entry(lease)
        if partial is not None:
            entry.append(partial.response, partial.version_spans)
            entry.base = entry.length

    def fold(self, record: Progress) -> bool:
        """Apply `record`; False if tokens before it are missing, so that the trajectory has to start afresh.

        A record counts if its lease is the latest or later and it starts within the known tokens. Under a later lease
        it replaces the tokens beyond its start; under the same lease those are repeated and skipped.
        """
        entry = self._entries.get(record.trajectory_id)
        if entry is None:
            entry = self._entries[record.trajectory_id] = _Entry(record.lease)
        if record.lease < entry.lease or entry.broken:
            return True
        if record.start > entry.length:
            entry.broken = True
            return False
        if record.lease > entry.lease:
            entry.truncate(record.start)
            entry.lease, entry.base = record.lease, record.start
        known, size = entry.length - record.start, len(record.gained.token_ids)
        if known < size:
            entry.append(_slice(record.gained, known, size), cut_spans(record.version_spans, known, size))
        return True

    def hand_over(self, name: str, lease: int) -> None:
        """The owner under `lease` continues from all known tokens."""
        entry = self._entries.get(name)
        if entry is not None and lease > entry.lease:
            entry.lease, entry.base = lease, entry.length

    def get(self, name: str) -> PooledPartial | None:
        """The partial response to resume `name` from; None if it has to start afresh."""
        entry = self._entries.get(name)
        if entry is None or entry.broken or not entry.length:
            return None
        if len(entry.chunks) > 1:
            entry.chunks = [(_join([r for r, _ in entry.chunks]), join_spans(s for _, s in entry.chunks))]
        return PooledPartial(*entry.chunks[0])

    def gained(self, name: str) -> bool:
        """Whether the present owner has added tokens to `name`."""
        entry = self._entries.get(name)
        return entry is not None and not entry.broken and entry.length > entry.base

    def drop(self, name: str) -> bool:
        """Remove `name`; return whether it had an entry."""
        return self._entries.pop(name, None) is not None


def cut_spans(spans: tuple[VersionSpan, ...], start: int, stop: int) -> tuple[VersionSpan, ...]:
    """The part of `spans` that covers tokens `start` to before `stop`."""
    cut, at = [], 0
    for span in spans:
        length = min(stop, at + span.length) - max(start, at)
        if length > 0:
            cut.append(VersionSpan(span.version, length))
        at += span.length
    return tuple(cut)


def join_spans(parts: object) -> tuple[VersionSpan, ...]:
    """Concatenate spans; neighbours of one version become one."""
    joined: list[VersionSpan] = []
    for span in (span for part in parts for span in part):  # type: ignore[attr-defined]
        if joined and joined[-1].version == span.version:
            joined[-1] = VersionSpan(span.version, joined[-1].length + span.length)
        else:
            joined.append(span)
    return tuple(joined)


def _slice(response: Response, start: int, stop: int) -> Response:
    if start == 0 and stop == len(response.token_ids):
        return response
    parts = (response.token_ids, response.logprobs, response.loss_mask)
    return Response(*(part.slice(start, stop - start) for part in parts))


def _join(parts: list[Response]) -> Response:
    columns = ("token_ids", "logprobs", "loss_mask")
    return Response(*(pa.concat_arrays([getattr(part, column) for part in parts]) for column in columns))
