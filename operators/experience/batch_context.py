"""What samplers and evictions may depend on besides the groups: the state of the log when a batch is decided."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from operators.experience.curriculum import Success
from operators.experience.groups import Group
from schemas.records import PolicyVersion


@dataclass(frozen=True, slots=True)
class BatchContext:
    """Global batch `batch` is due, with at least `wanted` trajectories, in `shares` shares for the trainer's ranks.

    `success` counts, by task, the settled answers to questions of the task's present curriculum level (of the last ones
    only, if the sampler has a `success_window`); in a call of
    `Sampler.level_request` it covers only the curriculum whose present level is `level`. `newest` is the newest weight
    version announced. `now` is this process's monotonic clock in seconds, without the time in which the run was paused,
    as `Group.seen_at`. `held` is the number of trajectories in the buffer.
    """

    batch: int
    wanted: int
    shares: int
    seed: int
    newest: PolicyVersion | None
    now: float
    held: int
    level: int = 0
    success: Mapping[str, Success] = field(default_factory=dict)

    def draw(self, group: Group) -> float:
        """A pseudo-random number in (0, 1) for `group`: a function of seed, batch and group number alone.

        It therefore depends neither on the order in which groups arrived nor on earlier draws.
        """
        text = f"{self.seed}/{self.batch}/{group.number}".encode()
        return (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") + 0.5) / 2**64

    def draw_key(self, group: Group, weight: float) -> float:
        """A sort key: ascending order draws without replacement in proportion to `weight`.

        Source: Efraimidis and Spirakis, 2006.
        """
        return -math.log(self.draw(group)) / weight if weight > 0 else math.inf
