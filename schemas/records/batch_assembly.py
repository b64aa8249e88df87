"""How the shards of the experience buffer form a global batch: all propose groups, the first selects."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.records.versions import PolicyVersion


@dataclass(frozen=True, slots=True)
class BatchProposal:
    """Shard `shard` of the buffer has `groups` ready, of `sizes` trajectories, and keeps them until they are selected.

    Written by each shard of experience, read by its first. A group is named by its prompt's number; an imported group,
    which is numbered apart, by -1 - number. `newest_version` is the newest weight version the shard had read.
    """

    shard: int
    groups: tuple[int, ...]
    sizes: tuple[int, ...]
    newest_version: PolicyVersion | None
    proposed_at: int


@dataclass(frozen=True, slots=True)
class BatchSelection:
    """Global batch `batch` consists of `groups`: each shard writes those that it proposed. None: it takes them back.

    Written by the first shard of experience, read by all. Every batch is selected once, in order. `newest_version` is
    the newest weight version that shard had read.
    """

    batch: int | None
    groups: tuple[int, ...]
    newest_version: PolicyVersion | None
    selected_at: int


@dataclass(frozen=True, slots=True)
class LevelSuccess:
    """Success of shard `shard` on the current level of `curriculum` ("": the only one), from prompt `first_prompt` on.

    For each of `tasks`: the number of answers in `answered`, and the sum of their success in `correct`. Written by each
    shard of experience, read by the others.
    """

    shard: int
    curriculum: str
    first_prompt: int
    tasks: tuple[str, ...]
    correct: tuple[float, ...]
    answered: tuple[int, ...]
    reported_at: int
