"""The last records of replicas that have ended: their work is not lost before placement has read them.

The end of a replica and its last records are on different topics, so placement may read of the end first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from infra.kafka.log_ends import EndsUnknown
from operators.io.elements import PartitionKey
from operators.placement.work_table import Owner

log = logging.getLogger(__name__)

Ends = Mapping[PartitionKey, int]


class EndedOwners:
    """`read_ends` returns the present ends of the topics that replicas write, open transactions included."""

    def __init__(self, read_ends: Callable[[], Ends]) -> None:
        self._read_ends = read_ends
        self._ends: dict[Owner, Ends] = {}
        """By ended owner of work: the ends of the topics after its last record."""

    def fully_read(self, ended: Iterable[Owner], positions: Ends) -> set[Owner]:
        """Those of `ended`, all ended owners of work, whose records are all before `positions`."""
        owners = set(ended)
        self._ends = {owner: ends for owner, ends in self._ends.items() if owner in owners}
        if new := owners - self._ends.keys():
            try:
                self._ends |= dict.fromkeys(new, self._read_ends())
            except EndsUnknown as error:
                log.warning("the work of ended replicas waits, since the ends of topics are unknown: %s", error)
        return {
            owner
            for owner, ends in self._ends.items()
            if all(positions.get(place, end) >= end for place, end in ends.items())
        }
