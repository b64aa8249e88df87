"""Training batches, how the shards of the experience buffer form them, and the levels of difficulty."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.array_fields import Flags, Floats, Integers, TokenIds
from schemas.records.versions import PolicyVersion


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A packed part of global batch `batch`: part `index` of the `count` parts of its share.

    Written by experience, read by the trainer's rank that trains share `rank`, which has a partition of its own: rank
    `rank` where all ranks have one share. Every share has as many parts; where one has less work its last parts are
    empty (n = t = 0). All sequences of a group are in one share, next to each other, so that statistics of a group need
    no other rank.

    With n sequences of t tokens in all: token_ids, logprobs and loss_mask are [t] (prompt positions carry logprob 0 and
    mask False); lengths and prompt_lengths are [n], as are rewards, temperatures, truncated, staleness, the version
    columns and the lineage columns, which give partition and offset of each sequence in the experiences topic. Logprobs
    are of the softmax of logits / temperature, from which the tokens were drawn. `breaks` are rising positions among
    the t tokens at which the context restarts within a sequence: a token attends to none before the last break.
    `context_rewards` has the reward of each context, of n + len(breaks) in their order; it is empty if each has that of
    its sequence.
    """

    batch: int
    index: int
    count: int
    rank: int
    token_ids: TokenIds
    logprobs: Floats
    loss_mask: Flags
    lengths: Integers
    prompt_lengths: Integers
    rewards: Floats
    temperatures: Floats
    truncated: Flags
    trajectory_ids: tuple[str, ...]
    version_epochs: Integers
    version_numbers: Integers
    staleness: Integers
    lineage_partitions: Integers
    lineage_offsets: Integers
    breaks: Integers
    context_rewards: Floats


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


@dataclass(frozen=True, slots=True)
class LevelRequest:
    """Requests questions of `level` of `task` ("": the only one) from now on. Written by experience, read by prompts.

    `batch` is the next batch at the time of the request. `success_rate` is the mean success of the `answered` answers
    to questions of the level before.
    """

    task: str
    level: int
    batch: int
    success_rate: float
    answered: int
    requested_at: int


@dataclass(frozen=True, slots=True)
class LevelReply:
    """Training prompts of `task` from number `first_prompt` on are of `level`. Written by prompts, read by experience.

    Written with the first of these prompts. Prompts before the first reply are of level 0.
    """

    task: str
    level: int
    first_prompt: int
    replied_at: int
