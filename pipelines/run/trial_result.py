"""The result of a run's trial (trial.py), which its supervisor reads."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

TRIAL = "preflight"
"""The name of the job and of its log."""
RESULT_FILE = "preflight.json"
TRIAL_CONFIG_FILE = "preflight.toml"
"""The configuration that the job reads: config.toml is written after the run's topics."""


@dataclass
class TrialResult:
    """What the trial found: `problems` stop the run, `warnings` do not."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def read_trial(file: Path) -> TrialResult:
    """The result in `file`. Raises OSError, ValueError."""
    return TrialResult(**json.loads(file.read_text("utf-8")))
