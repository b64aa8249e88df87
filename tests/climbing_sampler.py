"""A sampler that requests the next level after four answers, whatever they are."""

from __future__ import annotations

from operators.experience.batch_context import BatchContext
from operators.experience.config import Component
from operators.experience.samplers import Sampler


class Climb(Sampler):
    """Requests harder questions until the last level."""

    def level_request(self, context: BatchContext) -> int:
        return int(sum(each.answered for each in context.success.values()) >= 4)


CLIMB = Component(f"{__file__}:Climb")
