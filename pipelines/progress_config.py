"""How long one step of each role may take."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from infra.runners.liveness import StepBudget


@dataclass(frozen=True)
class ProgressConfig:
    """Time limits of one step of each role, in seconds. A step that exceeds its limit is stalled.

    `restore_s` bounds the start of any role before its first step: load the model, read the checkpoint, wait for the
    other ranks. The others bound the work on one poll: for the trainer one batch, for score all verifiers of the
    records of one poll.
    """

    restore_s: float = 3600.0
    """Time to load the model, read the checkpoint and the log, and wait for other ranks, before the first step."""
    prompts_s: float = 600.0
    """Budget of one step of prompts."""
    placement_s: float = 600.0
    """Budget of one step of placement."""
    rollout_s: float = 1800.0
    """Budget of one step of rollout."""
    relay_s: float = 600.0
    """Budget of one step of the relay."""
    score_s: float = 3600.0
    """Budget of one step of score: the verifiers of one poll."""
    experience_s: float = 600.0
    """Budget of one step of experience."""
    trainer_s: float = 7200.0
    """Budget of one step of the trainer: one global batch."""
    evaluation_s: float = 600.0
    """Budget of one step of evaluation."""
    gateway_s: float = 600.0
    """Budget of one step of the gateway."""
    agents_s: float = 600.0
    """Budget of one step of agents: starting them, not what they do."""
    stalled: Literal["restart", "report"] = "restart"
    """On a stalled step: end the process, which is restarted, or only log a warning."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name.endswith("_s") and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{each.name} must be a positive number of seconds, not {value}")

    def budget(self, pipeline: str) -> StepBudget:
        """The time limits of a step of `pipeline`."""
        setting = f"progress.restore_s or progress.{pipeline}_s"
        return StepBudget(self.restore_s, getattr(self, f"{pipeline}_s"), setting, self.stalled == "restart")
