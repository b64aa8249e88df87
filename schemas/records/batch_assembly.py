"""How the shards of the buffer make a batch together: each offers what it has ready, and the first calls it up."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.records.versions import PolicyVersion


@dataclass(frozen=True, slots=True)
class BatchProposal:
    """Shard `shard` of the buffer has `groups` ready, of `sizes` trajectories, and keeps them until they are called.

    Made by each shard of experience, eaten by its first. Groups go by their prompts' numbers; imported ones, which are
    numbered apart, by -1 - number. `newest` is the weight version announced last, as the shard knew.
    """

    shard: int
    groups: tuple[int, ...]
    sizes: tuple[int, ...]
    newest: PolicyVersion | None
    proposed_at: int


@dataclass(frozen=True, slots=True)
class BatchSelection:
    """Global batch `batch` is made of `groups`: each shard writes those that it has offered. None: it takes them back.

    Made by the first shard of experience, eaten by all. Every batch is called once, in their order. `newest` is the
    weight version announced last, as that shard knew.
    """

    batch: int | None
    groups: tuple[int, ...]
    newest: PolicyVersion | None
    selected_at: int


@dataclass(frozen=True, slots=True)
class LevelSuccess:
    """How the questions of a level of `curriculum` ("": the only one), from prompt `since` on, have fared in `shard`.

    Of `answered` answers to questions of each of `tasks` so many were `right`. Made by each shard of experience, eaten
    by the others.
    """

    shard: int
    curriculum: str
    since: int
    tasks: tuple[str, ...]
    right: tuple[float, ...]
    answered: tuple[int, ...]
    reported_at: int
