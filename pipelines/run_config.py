"""The section [run] of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from infra.runners.liveness import StepBudget
from infra.setting_types import (
    CheckedSettings,
    FiniteNonNegative,
    FinitePositive,
    NonNegativeInt,
    PositiveInt,
    PositiveShare,
    Seed,
)
from pipelines.roles import COMPACT_CORES
from schemas.topics import run_prefix

SEEDS = range(2**29)
TrackerName = Literal["mlflow", "tensorboard", "trackio", "wandb"]


@dataclass(frozen=True)
class RunConfig(CheckedSettings):
    """The run. `name` is part of its topic names; default: the task and the time. `folder` holds all runs."""

    name: str = ""
    """The run's name, a part of its topics' names; empty: made of task and time."""
    folder: Path = Path("runs")
    """The folder that holds the folders of all runs."""
    seed: Seed = 0
    """Seed of prompts, sampling and warm start, unless their own sections set one."""
    time_scale: FinitePositive = 1.0
    """Emulated seconds per real second, if rollout.engine is emulated."""
    trackers: tuple[TrackerName, ...] = ()
    """Trackers that receive metrics in addition to metrics.jsonl; each needs the package extra of its name."""
    layout: Literal["auto", "compact", "isolated"] = "auto"
    """The processes of `laminar run`. `isolated`: one for each role, so a failure of one stops no other. `compact`: the
    roles without a model (all but rollout, trainer, gateway, agents, and score if its verifiers may be slow) are
    branches of one pipeline in one process, which saves memory and start-up. `auto`: compact on up to 4 cores, else
    isolated."""
    audit_every_s: FiniteNonNegative = 120.0
    """Seconds between audits while the run is active, more if an audit takes long; 0: one audit, at the end."""
    stop_error_share: PositiveShare = 1.0
    """The run stops when this share of the newest `stop_error_window` scored trajectories has an error, of the reward
    function, the environment or the generation."""
    stop_error_window: NonNegativeInt = 64
    """Trajectories in the window of `stop_error_share`; 0: errors never stop the run."""
    warn_steps: PositiveInt = 10
    """Batches in a row without a gradient, or without a difference in rewards, before the run warns of it."""
    allow_no_learning: bool = False
    """Accept settings with which nothing can be learned, such as a learning rate of 0: to measure speed."""

    check_timeout_s: FiniteNonNegative = 30.0
    """Before the topics are written, rewards and environments are loaded and tried on a few prompts of each task: the
    time limit of each load, and of the prompts after the first. A single call has the limit `score.time_limit_s`, or
    `seconds` of the environment. 0: user code is not checked before the start."""

    def _check(self) -> None:
        if self.name:
            run_prefix(self.name)

    def is_compact(self, cores: int) -> bool:
        """Whether the layout is compact on a machine with `cores` cores."""
        return cores <= COMPACT_CORES if self.layout == "auto" else self.layout == "compact"


@dataclass(frozen=True)
class ProgressConfig(CheckedSettings):
    """Time limits of one step of each role, in seconds. A step that exceeds its limit is stalled.

    `restore_s` bounds the start of any role before its first step: load the model, read the checkpoint, wait for the
    other ranks. The others bound the work on one poll: for the trainer one batch, for score all verifiers of the
    records of one poll.
    """

    restore_s: FinitePositive = 3600.0
    """Time to load the model, read the checkpoint and the log, and wait for other ranks, before the first step."""
    prompts_s: FinitePositive = 600.0
    """Budget of one step of prompts."""
    placement_s: FinitePositive = 600.0
    """Budget of one step of placement."""
    rollout_s: FinitePositive = 1800.0
    """Budget of one step of rollout."""
    relay_s: FinitePositive = 600.0
    """Budget of one step of the relay."""
    score_s: FinitePositive = 3600.0
    """Budget of one step of score: the verifiers of one poll."""
    experience_s: FinitePositive = 600.0
    """Budget of one step of experience."""
    trainer_s: FinitePositive = 7200.0
    """Budget of one step of the trainer: one global batch."""
    evaluation_s: FinitePositive = 600.0
    """Budget of one step of evaluation."""
    gateway_s: FinitePositive = 600.0
    """Budget of one step of the gateway."""
    autoscaler_s: FinitePositive = 600.0
    """Budget of one step of the autoscaler."""
    agents_s: FinitePositive = 600.0
    """Budget of one step of agents: starting them, not what they do."""
    stalled: Literal["restart", "report"] = "restart"
    """On a stalled step: end the process, which is restarted, or only log a warning."""

    def budget(self, pipeline: str) -> StepBudget:
        """The time limits of a step of `pipeline`."""
        setting = f"progress.restore_s or progress.{pipeline}_s"
        return StepBudget(self.restore_s, getattr(self, f"{pipeline}_s"), setting, self.stalled == "restart")
