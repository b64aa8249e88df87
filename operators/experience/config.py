"""How the experience buffer makes batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Le

from infra.name_lookup import load_class, suggest_name
from infra.setting_types import CheckedSettings, NonNegative, NonNegativeInt, PositiveInt
from operators.experience.evictions import EVICTIONS, Eviction, Staleness
from operators.experience.samplers import SAMPLERS, Sampler
from operators.experience.writers import WRITERS, Writer

T = TypeVar("T")


@dataclass(frozen=True)
class Component:
    """The name of a writer, sampler or eviction, and the options for its class.

    A user's class must be trusted code: it runs in the process of the experience pipeline.
    """

    name: str
    """A built-in component, `module:Class` or `file.py:Class`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the component."""

    @property
    def is_custom(self) -> bool:
        """Whether it is a user's class."""
        return ":" in self.name


def make_component(key: str, component: Component, known: Mapping[str, type[T]], base: type[T]) -> T:
    """An instance of the class that `component` names. `key` is the configuration key for errors.

    Raises ValueError for an unknown name, an unknown option or a bad value.
    """
    kind = load_class(key, component.name, base) if component.is_custom else known.get(component.name)
    if kind is None:
        raise ValueError(f"{key}: there is none called {component.name!r}{suggest_name(component.name, known)}")
    options = {option.name for option in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else None
    for name in component.options:
        if options is not None and name not in options:
            raise ValueError(f"{key}: {component.name} has no option {name!r}{suggest_name(name, options)}")
    try:
        return kind(**component.options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}: {component.name}: {error}") from error


MAX_MICRO_BATCH_TOKENS = 400_000
"""The largest micro-batch record: token, logprob and mask take 8.2 bytes, and a record may have 8 MiB."""

PartialGroups = Literal["train", "drop"]
OverAge = Literal["correct", "drop", "wait"]


@dataclass(frozen=True)
class ExperienceConfig(CheckedSettings):
    """Settings of the experience buffer. Raises ValueError naming the field that does not fit."""

    global_batch: PositiveInt = 128
    """Trajectories in a batch, at least: a batch takes whole groups until it has this many."""
    max_staleness: NonNegativeInt = 2
    """The staleness at consumption, in versions, that placement paces admission to: newest version announced minus the
    version that generated. Long answers may exceed it; see `over_age`."""
    over_age: OverAge = "correct"
    """What happens to trajectories staler than `max_staleness`. `correct`: they are trained with off-policy correction
    and counted (`over_age` in the metrics). `drop`: they are dropped, which starves long answers. `wait`: groups are
    trained in the order of their prompts, so the buffer waits for the longest answers. `drop` guarantees the bound when
    the batch is made, which may wait for the trainer; `wait` also at the update that trains it; `correct` does not."""
    micro_batch_tokens: Annotated[int, Ge(1), Le(MAX_MICRO_BATCH_TOKENS)] = 65_536
    """Tokens in one micro-batch record, at most; a longer sequence has a record of its own."""
    writers: tuple[Component, ...] = ()
    """Which members enter the buffer (docs/experience.md): all writers must accept. Members that cannot be trained
    never enter."""
    sampler: Component = field(default_factory=lambda: Component("fifo"))
    """In which order groups leave the buffer (docs/experience.md)."""
    evictions: tuple[Component, ...] = ()
    """Which members are dropped from the buffer (docs/experience.md)."""
    group_timeout_s: NonNegative = 0.0
    """How long a group waits for missing members after its first one; 0: for ever, since placement ends every
    trajectory."""
    partial_groups: PartialGroups = "train"
    """What happens to a group after `group_timeout_s`: it is trained without the missing members, or dropped. Members
    that arrive later are dropped."""
    seed: int = 0
    """Seed of samplers that draw."""
    shards: PositiveInt = 1
    """Number of processes of the buffer, which share the partitions of experiences. It may change when a run is
    resumed, up to `max_shards`."""
    max_shards: NonNegativeInt = 0
    """How many shards the run may ever have: each batch has so many parts. 0: `shards`, whose number is then fixed for
    the run."""

    def _check(self) -> None:
        if self.max_shards and self.max_shards < self.shards:
            raise ValueError(f"max_shards must be 0 or at least shards ({self.shards}), not {self.max_shards}")
        if self.over_age == "wait":
            self._check_wait()
        for key, component, known, base in (
            ("sampler", self.sampler, SAMPLERS, Sampler),
            *(("writers", each, WRITERS, Writer) for each in self.writers),
            *(("evictions", each, EVICTIONS, Eviction) for each in self.evictions),
        ):
            if not component.is_custom:  # a user's class is imported only in the process that runs it
                make_component(key, component, known, base)

    @property
    def divisions(self) -> int:
        """The number of divisions of the buffer, see BufferLayout."""
        return self.max_shards or self.shards

    def make_sampler(self) -> Sampler:
        """The sampler. Raises ValueError if a user's class is not a Sampler."""
        return make_component("sampler", self.sampler, SAMPLERS, Sampler)

    def make_writers(self) -> tuple[Writer, ...]:
        """The writers. Raises ValueError if a user's class is not a Writer."""
        return tuple(make_component("writers", each, WRITERS, Writer) for each in self.writers)

    def make_evictions(self) -> tuple[Eviction, ...]:
        """The evictions. Raises ValueError if a user's class is not an Eviction."""
        own = tuple(make_component("evictions", each, EVICTIONS, Eviction) for each in self.evictions)
        return (Staleness(self.max_staleness), *own) if self.over_age == "drop" else own

    def _check_wait(self) -> None:
        """Raise ValueError for settings that contradict `over_age = "wait"`, which orders groups by prompt number."""
        if self.divisions > 1:
            setting = f"shards = 1, not {self.shards}" if self.shards > 1 else f"max_shards = 0, not {self.max_shards}"
            raise ValueError(f"over_age = 'wait' needs {setting}: one process orders the groups")
        if self.sampler.name != "fifo":
            raise ValueError(
                f"over_age = 'wait' needs sampler 'fifo', not {self.sampler.name!r}: groups leave by prompt number"
            )
