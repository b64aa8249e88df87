"""When a decision is taken, as the log knows it: what samplers and evictions may depend on besides the groups."""

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
    """Global batch `batch` is to be made, of `wanted` trajectories at least, for `ranks` trainer ranks.

    `success` is that at the questions of the present level of each task's curriculum, of stories that have ended; where
    a sampler is asked for its wish, that of the one task alone whose `level` it is.
    `newest` is the newest weight version announced; `now` is this process's monotonic clock in seconds, which
    `Group.seen_at` goes by; `held` how many trajectories the buffer holds.
    """

    batch: int
    wanted: int
    ranks: int
    seed: int
    newest: PolicyVersion | None
    now: float
    held: int
    level: int = 0
    success: Mapping[str, Success] = field(default_factory=dict)

    def draw(self, group: Group) -> float:
        """A number in (0, 1) for `group` in this batch: a function of seed, batch and group alone.

        So what is drawn does not depend on the order in which groups came, nor on what was drawn before.
        """
        text = f"{self.seed}/{self.batch}/{group.number}".encode()
        return (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") + 0.5) / 2**64

    def race(self, group: Group, weight: float) -> float:
        """Sort by this to draw without replacement in proportion to `weight` (Efraimidis and Spirakis, 2006)."""
        return -math.log(self.draw(group)) / weight if weight > 0 else math.inf
