"""Samplers: in which order groups leave the buffer as global batches. By name, or a user's `module:Class`.

A sampler is a function of the groups and the batch context, so the same log gives the same batches. It may refuse a
complete group for good, and it orders the ready groups, which are taken in that order until a batch is full.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from infra.setting_types import CheckedSettings, NonNegative, Positive, PositiveInt
from operators.experience.batch_context import BatchContext
from operators.experience.curriculum import total_success
from operators.experience.groups import Group


@dataclass(frozen=True)
class Sampler:
    """The base class, and `fifo`: orders groups by completion, and refuses none. Options are dataclass fields."""

    def refuse(self, group: Group) -> str | None:
        """Why complete `group` must never be trained, or None."""
        return None

    def order(self, ready: Sequence[Group], context: BatchContext) -> Iterable[Group]:
        """The order in which to take groups of `ready`, which is in the order of completion.

        May be a lazy iterator: the buffer takes only as many as a batch needs. Groups left out wait.
        """
        return ready

    def level_request(self, context: BatchContext) -> int:
        """The change of level to request, by `context.success`: 1 for harder prompts, -1 for easier ones, 0 for none.

        Called with every emission. A change beyond the curriculum's last or first level is ignored.
        """
        return 0

    @property
    def success_window(self) -> int | None:
        """Which answers `context.success` counts: the last so many to twice as many; None: all at the present level."""
        return None


@dataclass(frozen=True)
class NewestFirst(Sampler):
    """Takes the newest groups first. Older groups become stale: combine it with an eviction."""

    def order(self, ready: Sequence[Group], context: BatchContext) -> Iterable[Group]:
        return reversed(ready)


@dataclass(frozen=True)
class StalenessWeighted(Sampler, CheckedSettings):
    """Draws groups at random, fresh ones more often: a group's weight halves with every `half_life` versions of
    staleness of its stalest member."""

    half_life: Positive = 1.0

    def order(self, ready: Sequence[Group], context: BatchContext) -> Iterable[Group]:
        def key(group: Group) -> float:
            return context.draw_key(group, 2.0 ** -(group.staleness(context.newest) / self.half_life))

        return sorted(ready, key=key)


@dataclass(frozen=True)
class Prioritised(Sampler, CheckedSettings):
    """Draws groups at random, with weight (standard deviation of rewards + `floor`) ** `alpha`.

    `alpha` 0 draws uniformly. Source: Schaul et al., arXiv 1511.05952, 3.3, with that deviation as the priority.
    """

    alpha: NonNegative = 1.0
    floor: Positive = 0.01

    def order(self, ready: Sequence[Group], context: BatchContext) -> Iterable[Group]:
        def key(group: Group) -> float:
            return context.draw_key(group, (statistics.pstdev(group.rewards) + self.floor) ** self.alpha)

        return sorted(ready, key=key)


@dataclass(frozen=True)
class Windowed(Sampler, CheckedSettings):
    """Shuffles the oldest `window` groups and takes no others."""

    window: PositiveInt = 256

    def order(self, ready: Sequence[Group], context: BatchContext) -> Iterable[Group]:
        return sorted(ready[: self.window], key=context.draw)


@dataclass(frozen=True)
class LengthBalanced(Sampler, CheckedSettings):
    """Balances the lengths of batches: takes the oldest group, then alternates between long and short groups.

    It alternates among the oldest `window` groups, so that no batch consists of long answers only and the load can be
    balanced over shares.
    """

    window: PositiveInt = 64

    def order(self, ready: Sequence[Group], context: BatchContext) -> Iterable[Group]:
        by_length = sorted(ready[1 : self.window], key=lambda group: group.tokens)
        half = len(by_length) // 2
        in_turn = chain.from_iterable(zip(reversed(by_length[half:]), by_length[:half], strict=False))
        middle = by_length[half : half + 1] if len(by_length) % 2 else []
        return chain(ready[:1], in_turn, middle, ready[self.window :])


@dataclass(frozen=True)
class _FilteringSampler(Sampler, CheckedSettings):
    """Refuses some groups and orders the others as sampler `order_by` does."""

    order_by: str = "fifo"

    def _check(self) -> None:
        kind = SAMPLERS.get(self.order_by)
        if kind is None or issubclass(kind, _FilteringSampler):
            raise ValueError(f"order_by must be a sampler that orders groups, such as 'fifo', not {self.order_by!r}")

    def order(self, ready: Sequence[Group], context: BatchContext) -> Iterable[Group]:
        return SAMPLERS[self.order_by]().order(ready, context)


@dataclass(frozen=True)
class GroupComplete(_FilteringSampler):
    """Refuses groups with a missing member: one that failed, was refused or did not arrive in time."""

    def refuse(self, group: Group) -> str | None:
        missing = group.expected - len(group.members)
        return f"the group lacks {missing} of its {group.expected} members" if missing > 0 else None


@dataclass(frozen=True)
class DynamicSampling(_FilteringSampler):
    """Keeps groups with 0 < correct answers < G: in others every advantage is 0 (DAPO, arXiv 2503.14476, eq. 11).

    An answer is correct if its accuracy is 1. If a member has no accuracy, the group is refused when all rewards are
    equal. A group with an agent whose conversations have different rewards is kept. Refused groups are settled, so
    placement admits more prompts, which is DAPO's resampling.
    """

    def refuse(self, group: Group) -> str | None:
        if any(len(set(member.conversation_rewards)) > 1 for member in group.members):
            return None
        accuracies = [member.accuracy for member in group.members if member.accuracy is not None]
        if len(accuracies) < len(group.members):
            return "all rewards of the group are equal" if len(set(group.rewards)) == 1 else None
        correct = sum(accuracy >= 1 for accuracy in accuracies)
        if not correct:
            return "no answer of the group is correct"
        return "every answer of the group is correct" if correct == len(accuracies) else None


@dataclass(frozen=True)
class CurriculumSampler(_FilteringSampler):
    """Requests harder questions if the success rate is above `harder_above`, easier ones if it is below `easier_below`,
    once at least `least` answers to questions of the present level are settled. The rate is that of the last `least` to
    twice as many answers, so success counts soon after it begins."""

    harder_above: float = 0.8
    easier_below: float = 0.2
    least: PositiveInt = 256

    def _check(self) -> None:
        super()._check()
        if not 0 <= self.easier_below < self.harder_above <= 1:
            raise ValueError("curriculum needs 0 <= easier_below < harder_above <= 1")

    def level_request(self, context: BatchContext) -> int:
        success = total_success(context.success)
        if success.answered < self.least:
            return 0
        return (success.rate > self.harder_above) - (success.rate < self.easier_below)

    @property
    def success_window(self) -> int:
        return self.least


SAMPLERS: Mapping[str, type[Sampler]] = {
    "fifo": Sampler,
    "newest_first": NewestFirst,
    "staleness_weighted": StalenessWeighted,
    "prioritised": Prioritised,
    "windowed": Windowed,
    "length_balanced": LengthBalanced,
    "group_complete": GroupComplete,
    "dynamic": DynamicSampling,
    "curriculum": CurriculumSampler,
}
