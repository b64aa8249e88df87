"""The settings that may change when a run is resumed, and the roles that read each of them while they run."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from pipelines.config import Config, ConfigError, flattened
from pipelines.config_draft import names_any
from pipelines.roles import ALL_PIPELINES

RESUMABLE: Mapping[str, tuple[str, ...]] = {
    "trainer.optimizer_steps": ("prompts", "placement", "trainer"),
    "trainer.checkpoint_every": ("trainer",),
    "trainer.checkpoints_kept": ("trainer",),
    "trainer.checkpoint_tries": ("trainer",),
    "trainer.collective_timeout_s": ("trainer",),
    "trainer.ranks": ("trainer",),
    "trainer.batch_shares": (),
    "trainer.shard_ranks": ("trainer",),
    "trainer.context_ranks": ("trainer",),
    "trainer.gpus": ("trainer",),
    "trainer.rank_0_host": ("trainer",),
    "trainer.lost_batches": ("trainer",),
    "trainer.missing_batch_wait_s": ("trainer",),
    "trainer.learner.max_skipped_batches": ("trainer",),
    "rollout.step_timeout_s": ("rollout",),
    "relay.keep_versions": ("trainer", "relay", "rollout"),
    "relay.store": ("trainer", "relay", "rollout"),
    "score.shards": ("score",),
    "experience.shards": ("experience",),
    "run.layout": (),
    "run.audit_every_s": ("trainer",),
    "run.stop_error_share": ("score",),
    "run.stop_error_window": ("score",),
    "run.warn_steps": (),
    "run.allow_no_learning": (),
    "prompts.max_refused_share": ("prompts",),
    "prompts.epochs": ("prompts",),
    "run.check_timeout_s": (),
    "kafka.outage_timeout_s": (),
    "kafka.transaction_timeout_s": ALL_PIPELINES,
    **{f"progress.{pipeline}_s": (pipeline,) for pipeline in ALL_PIPELINES},
    "progress.restore_s": ALL_PIPELINES,
    "progress.stalled": ALL_PIPELINES,
    "agents.memory_limit_mb": ("agents",),
    "gateway.advertise": ("gateway",),
}
"""The keys that may change when a run is resumed, as no record of the run depends on them, and the roles whose process
or respawner reads each; others are read by a start and by commands."""


def changed_keys(before: Config, after: Config) -> list[str]:
    """The keys, "section.key", of which the configurations have different values."""
    old, new = flattened(before), flattened(after)
    return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))


def check_resumable(before: Config, after: Config, replaced: Collection[str] = ()) -> None:
    """Raise ConfigError if configuration `after` of a resumed run is not like `before`, except for RESUMABLE keys.

    Keys in `replaced` have a default in `after` because their values are wrong, which is another problem.
    """
    changed = [key for key in changed_keys(before, after) if not names_any(key, replaced)]
    if fixed := [key for key in changed if key not in RESUMABLE]:
        raise ConfigError(
            f"{', '.join(fixed)} cannot change in a resumed run, because its records were made with the old value; "
            f"these can: {', '.join(RESUMABLE)}. For another setting start a new run"
        )
    shares = before.trainer.shares
    if after.trainer.shares != shares:
        raise ConfigError(
            f"every batch of this run has {shares} shares, which are fixed, and trainer.ranks can be at most {shares}: "
            f"set trainer.batch_shares = {shares}, too"
        )
    if after.experience.divisions != before.experience.divisions:
        most = before.experience.divisions
        raise ConfigError(
            f"every batch of this run has parts for {most} {'shard' if most == 1 else 'shards'} of the buffer, so "
            f"experience.shards is {most}: a new run can have experience.max_shards, up to which it may change"
        )
    steps, goal = after.trainer.optimizer_steps, before.trainer.optimizer_steps
    if steps < goal:
        raise ConfigError(
            f"trainer.optimizer_steps = {steps} is less than the run's goal of {goal} steps; a run may stay stopped "
            "before its goal: `laminar weights pull latest` writes its newest model"
        )


def keep_model(folder: Path, before: Config, after: Config) -> None:
    """Rename the final model of a run that is extended: the trainer writes another one at the new goal.

    An extension that was interrupted has kept it already, and the trainer may have written it again.
    """
    steps = before.trainer.optimizer_steps
    model, kept = folder / "model", folder / f"model-{steps}"
    if after.trainer.optimizer_steps <= steps or not model.is_dir():
        return
    if kept.is_dir():
        shutil.rmtree(model)
    else:
        model.rename(kept)
