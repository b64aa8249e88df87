"""The result of a run's trial (trial.py), which its supervisor reads."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from infra.files import write_atomically
from pipelines.inspect.run_state.events import CheckStarted

TRIAL = "preflight"
"""The name of the job and of its log."""
RESULT_FILE = "preflight.json"
CHECK_FILE = "preflight-check.json"
"""Which check runs."""
TRIAL_CONFIG_FILE = "preflight.toml"
"""The configuration that the job reads: config.toml is written after the run's topics."""


@dataclass
class TrialResult:
    """What the trial found: `problems` stop the run, `warnings` do not."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def write_check(file: Path, subject: str, at: int) -> None:
    """Write that the check of `subject` began at `at` (Unix milliseconds)."""
    write_atomically(file, json.dumps({"subject": subject, "at": at}))


def read_check(file: Path) -> CheckStarted | None:
    """The check in `file`; None if none has begun. Raises ValueError."""
    try:
        return CheckStarted(**json.loads(file.read_text("utf-8")))
    except FileNotFoundError:
        return None


def read_trial(file: Path) -> TrialResult:
    """The result in `file`. Raises OSError, ValueError."""
    return TrialResult(**json.loads(file.read_text("utf-8")))
