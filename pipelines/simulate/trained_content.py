"""What the weights of a simulated learner contain: a hash of the batches that were trained, in order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from blake3 import blake3

CONTENT_BYTES = 32
INITIAL = bytes(CONTENT_BYTES).hex()
"""The content before the first batch."""


def row_number(trajectory_id: str) -> int:
    """An int64 for a trajectory."""
    return int.from_bytes(blake3(trajectory_id.encode()).digest(8), "little", signed=True)


def next_content(content: str, rows: Iterable[int]) -> str:
    """The content after a batch with the trajectories of `rows`, in any order."""
    return blake3(f"{content} {sorted(rows)}".encode()).hexdigest()


class TrainedContent:
    """The content after each batch of `batches`, trajectories by batch number, which grows."""

    def __init__(self, batches: Mapping[int, Collection[str]]) -> None:
        self._batches = batches
        self._found = [INITIAL]

    def after(self, count: int) -> str:
        """The content after `count` batches. Raises KeyError for a batch that is not in the log."""
        while len(self._found) <= count:
            rows = map(row_number, self._batches[len(self._found) - 1])
            self._found.append(next_content(self._found[-1], rows))
        return self._found[count]
