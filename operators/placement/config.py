"""Configuration of placement: admission, dispatch, moves and time-outs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from infra.setting_types import CheckedSettings, NonNegative, NonNegativeInt, Positive, PositiveInt, PositiveShare

Schedule = Literal["laminar", "synchronous", "one_step", "stream", "partial_rollout"]
Refresh = Literal["drain", "boundary", "interrupt", "slot"]


@dataclass(frozen=True)
class Rules:
    """How generation and weight updates are coordinated.

    `admitted_batches` bounds the outstanding work in global batches; None: max_staleness + 1. `refresh` sets when a
    replica loads newer weights: `drain` when its own batch has drained, `boundary` when all replicas have generated a
    round of `round_batches` global batches, `interrupt` at once, within trajectories, `slot` at once, for trajectories
    that begin then, while older ones finish beside them under their own weights.
    """

    admitted_batches: int | None
    refresh: Refresh
    repack: bool
    round_batches: int = 1

    @property
    def refreshes_at_once(self) -> bool:
        """Whether replicas load newer weights without becoming empty."""
        return self.refresh in ("interrupt", "slot")


SCHEDULES: Mapping[Schedule, Rules] = {
    "laminar": Rules(None, "drain", repack=True),
    # verl: generate a batch, train it, repeat.
    "synchronous": Rules(1, "boundary", repack=False),
    # Batch n is generated while batch n - 1 is trained.
    "one_step": Rules(2, "boundary", repack=False),
    # StreamRL: the trainer starts with early finishers; weights are synchronised once a round.
    "stream": Rules(2, "boundary", repack=False, round_batches=2),
    # AReaL: newer weights interrupt running trajectories, which continue under them.
    "partial_rollout": Rules(None, "interrupt", repack=False),
}


_LEAST_LEAD = 64
_LEAD_BATCHES = 16
"""Global batches whose prompts are drawn ahead."""


@dataclass(frozen=True)
class PlacementConfig(CheckedSettings):
    """How trajectories are admitted, assigned to replicas and moved. Raises ValueError naming the invalid field."""

    schedule: Schedule = "laminar"
    """Schedule of generation and weight updates; the next three fields override its rules. `laminar`: trajectories at
    their own pace. As published systems do: `synchronous` generates a batch and trains it, in turn; `one_step`
    generates the next batch meanwhile; `stream` trains early finishers of two batches; `partial_rollout` interrupts
    running trajectories for newer weights."""
    admitted_batches: PositiveInt | None = None
    """Global batches that may be outstanding; unset: those of the schedule."""
    refresh: Refresh | None = None
    """When replicas load newer weights: `drain`, once their own batch has drained; `boundary`, once all have generated
    a round; `interrupt`, at once, within trajectories; `slot`, at once, for trajectories that begin then, while older
    ones finish beside them under theirs, in twice the memory (then nothing is repacked). Unset: as the schedule
    says."""
    repack: bool | None = None
    """Whether trajectories move, so that replicas are free for newer weights; unset: as the schedule says."""
    repack_s: Positive = 5.0
    """Period in seconds of planning moves; they are planned after each global batch too."""
    repack_kv: PositiveShare = 0.99
    """Share of a replica's KV that moves may fill."""
    repack_requests: PositiveInt | None = None
    """Requests that moves may bring a replica to, where further ones slow its decoding; unset: its slots."""
    replica_batch: PositiveInt | None = None
    """Maximum training assignments of a replica under one weight version; unset: its slots."""
    max_replicas: PositiveInt = 8
    """Maximum replicas of a run: the inbox has a partition for each."""
    prefetch: NonNegativeInt | None = None
    """Assignments that a replica may hold beyond those that run at once, by its slots and by its KV at the observed
    lengths. Unset: a whole batch, of which the engine admits what fits, so that its KV is full until none waits."""
    stage_groups: bool = True
    """Whether replicas whose machines have parts of the newest version run it in stages until one has all of it."""
    stage_min_s: NonNegative = 2.0
    """Seconds that the version must still take to arrive for a stage group to be formed."""
    prompt_lead: PositiveInt | None = None
    """How many prompts the prompts pipeline is ahead of dispatch. Unset: 64, or those of 16 global batches if these
    are more and the level of difficulty never changes, since a new level begins behind them; then it draws once a
    quarter of them is missing. It reads twice a second how many are left, a number that is up to a second old: a
    smaller lead limits how fast batches follow each other."""
    heartbeat_timeout_s: Positive = 10.0
    """Seconds without a heartbeat after which a replica is fenced and its work is assigned to others."""
    max_attempts: PositiveInt = 4
    """Starts without tokens after which a trajectory fails, so that a prompt that crashes engines ends. A start that a
    replica lost with its session, since Kafka was away, does not count."""

    @property
    def rules(self) -> Rules:
        """The rules of the schedule, with the overrides of this configuration."""
        overrides = {name: getattr(self, name) for name in ("admitted_batches", "refresh", "repack")}
        rules = replace(
            SCHEDULES[self.schedule], **{name: value for name, value in overrides.items() if value is not None}
        )
        # No replica has to be freed, and moves would need the version of each trajectory on the other one.
        return replace(rules, repack=False) if rules.refresh == "slot" else rules

    def lead(self, global_batch: int, samples_per_prompt: int, *, levels: bool) -> int:
        """How many prompts the prompts pipeline is ahead of dispatch; `levels`: the level of difficulty may change."""
        if self.prompt_lead is not None:
            return self.prompt_lead
        return _LEAST_LEAD if levels else max(_LEAST_LEAD, _LEAD_BATCHES * -(-global_batch // samples_per_prompt))

    def lead_slack(self, lead: int, *, levels: bool) -> int:
        """How many prompts of `lead` may be missing, so that prompts makes fewer transactions."""
        return 0 if levels or self.prompt_lead is not None else lead // 4

    def check_heartbeats(self, **periods: float) -> None:
        """Raise ValueError if heartbeats with these `periods`, in seconds by section, are too rare for the time-out."""
        for section, period in periods.items():
            if 3 * period > self.heartbeat_timeout_s:
                raise ValueError(
                    f"{section}.heartbeat_s = {period:g} needs placement.heartbeat_timeout_s of at least "
                    f"{3 * period:g}, three times it, not {self.heartbeat_timeout_s:g}"
                )

    def admitted(self, global_batch: int, max_staleness: int) -> int:
        """Maximum outstanding training trajectories: dispatched, and neither dropped nor in a published version."""
        batches = self.rules.admitted_batches
        return global_batch * (max_staleness + 1 if batches is None else batches)
