"""What leaves as a global batch: samplers, found by name, or `module:Class` of the user's.

A sampler is a function of the groups and the moment: the same log gives the same batch. It may refuse a group for good
when that is complete, and it says in which order ready groups are taken until a batch is full.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from operators.experience.batch_context import BatchContext
from operators.experience.curriculum import total
from operators.experience.groups import Group


@dataclass(frozen=True)
class Sampler:
    """Takes what completed first, and refuses nothing. Others derive from it; options are fields."""

    def refuse(self, group: Group) -> str | None:
        """Why complete `group` is never to be trained; None: it may be."""
        return None

    def order(self, ready: Sequence[Group], moment: BatchContext) -> Iterable[Group]:
        """`ready`, which stands in the order of completion, in the order in which groups are to be taken.

        Lazily: only as many are asked for as a batch needs. What is left out has to wait.
        """
        return ready

    def wish(self, moment: BatchContext) -> int:
        """Whether prompts are to be harder (1) or easier (-1) from now on, by `moment.success`; 0: as they are.

        Asked whenever stories have ended. A wish beyond the curriculum's last or first level is none.
        """
        return 0


@dataclass(frozen=True)
class NewestFirst(Sampler):
    """Takes what completed last. What it passes over grows old: give it an eviction."""

    def order(self, ready: Sequence[Group], moment: BatchContext) -> Iterable[Group]:
        return reversed(ready)


@dataclass(frozen=True)
class StalenessWeighted(Sampler):
    """Draws, fresh groups more likely: each `half_life` versions of its stalest member halve a group's weight."""

    half_life: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("half_life", self.half_life)

    def order(self, ready: Sequence[Group], moment: BatchContext) -> Iterable[Group]:
        def race(group: Group) -> float:
            return moment.race(group, 2.0 ** -(group.staleness(moment.newest) / self.half_life))

        return sorted(ready, key=race)


@dataclass(frozen=True)
class Prioritised(Sampler):
    """Draws, groups with more to learn from more likely: by (standard deviation of rewards + `floor`) ** `alpha`.

    `alpha` 0 draws uniformly (Schaul et al., arXiv 1511.05952, 3.3, with the spread of rewards as priority).
    """

    alpha: float = 1.0
    floor: float = 0.01

    def __post_init__(self) -> None:
        _check_positive("floor", self.floor)
        if self.alpha < 0:
            raise ValueError(f"alpha must not be negative, not {self.alpha}")

    def order(self, ready: Sequence[Group], moment: BatchContext) -> Iterable[Group]:
        def race(group: Group) -> float:
            return moment.race(group, (statistics.pstdev(group.rewards) + self.floor) ** self.alpha)

        return sorted(ready, key=race)


@dataclass(frozen=True)
class Windowed(Sampler):
    """Shuffles the oldest `window` groups, and takes nothing else."""

    window: int = 256

    def __post_init__(self) -> None:
        _check_positive("window", self.window)

    def order(self, ready: Sequence[Group], moment: BatchContext) -> Iterable[Group]:
        return sorted(ready[: self.window], key=moment.draw)


@dataclass(frozen=True)
class LengthBalanced(Sampler):
    """Makes every batch as long as the others: the oldest group, and then evenly from the short and the long ones.

    Of the oldest `window` groups it takes the longest and the shortest in turn, so that no batch is all long answers
    and every rank can be given its share.
    """

    window: int = 64

    def __post_init__(self) -> None:
        _check_positive("window", self.window)

    def order(self, ready: Sequence[Group], moment: BatchContext) -> Iterable[Group]:
        by_length = sorted(ready[1 : self.window], key=lambda group: group.tokens)
        half = len(by_length) // 2
        in_turn = chain.from_iterable(zip(reversed(by_length[half:]), by_length[:half], strict=False))
        middle = by_length[half : half + 1] if len(by_length) % 2 else []
        return chain(ready[:1], in_turn, middle, ready[self.window :])


@dataclass(frozen=True)
class _Refusing(Sampler):
    """Refuses some groups, and takes the others in the order of sampler `order_by`."""

    order_by: str = "fifo"

    def __post_init__(self) -> None:
        if SAMPLERS.get(self.order_by, _Refusing) in (GroupComplete, DynamicSampling, Curricular, _Refusing):
            raise ValueError(f"order_by {self.order_by!r} is no sampler that orders")

    def order(self, ready: Sequence[Group], moment: BatchContext) -> Iterable[Group]:
        return SAMPLERS[self.order_by]().order(ready, moment)


@dataclass(frozen=True)
class GroupComplete(_Refusing):
    """Refuses groups that lack a member: one that failed, or was waited for in vain."""

    def refuse(self, group: Group) -> str | None:
        lacking = group.expected - len(group.members)
        return f"the group lacks {lacking} of its {group.expected} members" if lacking > 0 else None


@dataclass(frozen=True)
class DynamicSampling(_Refusing):
    """Keeps groups with 0 < correct < G: of the others every advantage is 0 (DAPO, arXiv 2503.14476, eq. 11).

    Correct is an accuracy of 1; where a member has none, all rewards alike stand for it. What is refused is settled, so
    placement admits more: that is the resampling.
    """

    def refuse(self, group: Group) -> str | None:
        accuracies = [member.accuracy for member in group.members if member.accuracy is not None]
        if len(accuracies) < len(group.members):
            return "all rewards of the group are alike" if len(set(group.rewards)) == 1 else None
        correct = sum(accuracy >= 1 for accuracy in accuracies)
        if not correct:
            return "no answer of the group is right"
        return "every answer of the group is right" if correct == len(accuracies) else None


@dataclass(frozen=True)
class Curricular(_Refusing):
    """Wishes for harder questions where more than `harder_above` of the answers are right, for easier ones where fewer
    than `easier_below` are, once `least` answers to questions of a level have ended."""

    harder_above: float = 0.8
    easier_below: float = 0.2
    least: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive("least", self.least)
        if not 0 <= self.easier_below < self.harder_above <= 1:
            raise ValueError("curriculum needs 0 <= easier_below < harder_above <= 1")

    def wish(self, moment: BatchContext) -> int:
        known = total(moment.success)
        if known.answered < self.least:
            return 0
        return (known.share > self.harder_above) - (known.share < self.easier_below)


SAMPLERS: Mapping[str, type[Sampler]] = {
    "fifo": Sampler,
    "newest_first": NewestFirst,
    "staleness_weighted": StalenessWeighted,
    "prioritised": Prioritised,
    "windowed": Windowed,
    "length_balanced": LengthBalanced,
    "group_complete": GroupComplete,
    "dynamic": DynamicSampling,
    "curriculum": Curricular,
}


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be positive, not {value}")
