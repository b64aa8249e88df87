"""How the experience buffer makes batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from operators.experience.evictions import EVICTIONS, Eviction, Staleness
from operators.experience.parts import Component, make
from operators.experience.samplers import SAMPLERS, Sampler
from operators.experience.writers import WRITERS, Writer

MOST_TOKENS = 400_000
"""Of one micro-batch record: token, logprob and mask take 8.2 bytes, and a record may have 8 MiB."""

PartialGroups = Literal["train", "drop"]
OverAge = Literal["correct", "drop", "wait"]


@dataclass(frozen=True)
class ExperienceConfig:
    """What enters the buffer, what leaves it, what is dropped. Raises ValueError naming what does not fit."""

    global_batch: int = 128
    """Trajectories in a batch, at least: a batch takes whole groups until it has so many."""
    max_staleness: int = 2
    """Staleness at consumption, in versions, that admission is paced to (see placement): newest version announced minus
    the version that generated. Long answers may exceed it; `over_age` says what becomes of them."""
    over_age: OverAge = "correct"
    """What is done about trajectories older than `max_staleness`. `correct`: they are trained with off-policy
    correction and counted (`over_age` in the metrics). `drop`: they are dropped, which starves long answers. `wait`:
    groups are trained in the order of their prompts, so the buffer waits for the longest answers. `drop` and `wait`
    guarantee the bound, `correct` does not."""
    micro_batch_tokens: int = 65_536
    """Tokens in one micro-batch record; a longer sequence has a record of its own."""
    writers: tuple[Component, ...] = ()
    """What may enter (see writers.WRITERS): each may refuse. What cannot be trained at all never enters."""
    sampler: Component = field(default_factory=lambda: Component("fifo"))
    """What leaves (see samplers.SAMPLERS)."""
    evictions: tuple[Component, ...] = ()
    """What is dropped (see evictions.EVICTIONS): each may drop."""
    group_timeout_s: float = 0.0
    """How long a group waits for its missing members after the first has come; 0: for ever, since placement ends every
    trajectory."""
    partial_groups: PartialGroups = "train"
    """What becomes of a group that has waited so long: trained as it is, or dropped. Who comes later is dropped."""
    seed: int = 0
    """Of samplers that draw."""
    shards: int = 1
    """Processes that the buffer is spread over: each has the partitions of experiences that are its index, modulo
    `shards`. Fixed for a run."""

    def __post_init__(self) -> None:
        for name, least in (("shards", 1), ("global_batch", 1), ("max_staleness", 0), ("micro_batch_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.micro_batch_tokens > MOST_TOKENS:
            raise ValueError(f"micro_batch_tokens must be at most {MOST_TOKENS}, not {self.micro_batch_tokens}")
        if not self.group_timeout_s >= 0:
            raise ValueError(f"group_timeout_s must not be negative, not {self.group_timeout_s}")
        if self.partial_groups not in get_args(PartialGroups):
            raise ValueError(f"partial_groups must be 'train' or 'drop', not {self.partial_groups!r}")
        if self.over_age not in get_args(OverAge):
            raise ValueError(f"over_age must be 'correct', 'drop' or 'wait', not {self.over_age!r}")
        if self.over_age == "wait":
            self._check_waiting()
        for what, part, known, base in (
            ("sampler", self.sampler, SAMPLERS, Sampler),
            *(("writers", part, WRITERS, Writer) for part in self.writers),
            *(("evictions", part, EVICTIONS, Eviction) for part in self.evictions),
        ):
            if not part.is_custom:  # a user's class is imported where it runs, and there alone
                make(what, part, known, base)

    def make_sampler(self) -> Sampler:
        """The sampler. Raises ValueError if a class of the user's is none."""
        return make("sampler", self.sampler, SAMPLERS, Sampler)

    def make_writers(self) -> tuple[Writer, ...]:
        """The writers. Raises ValueError if a class of the user's is none."""
        return tuple(make("writers", part, WRITERS, Writer) for part in self.writers)

    def make_evictions(self) -> tuple[Eviction, ...]:
        """The evictions. Raises ValueError if a class of the user's is none."""
        own = tuple(make("evictions", part, EVICTIONS, Eviction) for part in self.evictions)
        return (Staleness(self.max_staleness), *own) if self.over_age == "drop" else own

    def _check_waiting(self) -> None:
        """Raise ValueError for what would take groups in another order than that of their prompts."""
        if self.shards > 1:
            raise ValueError(f"over_age = 'wait' needs shards = 1, not {self.shards}: one process orders the groups")
        if self.sampler.name != "fifo":
            raise ValueError(
                f"over_age = 'wait' needs sampler 'fifo', not {self.sampler.name!r}: prompts have an order"
            )
