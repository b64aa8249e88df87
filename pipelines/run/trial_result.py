"""The result of a run's trial (trial.py), which its supervisor reads."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.counted import counted
from infra.files import write_atomically
from pipelines.config import Config
from pipelines.inspect.run_state.events import CheckStarted
from schemas.records import AGENT

TRIAL = "preflight"
"""The name of the job and of its log."""
RESULT_FILE = "preflight.json"
CHECK_FILE = "preflight-check.json"
"""Which check runs."""
TRIAL_CONFIG_FILE = "preflight.toml"
"""The configuration that the job reads: config.toml is written after the run's topics."""


@dataclass
class TrialResult:
    """What the trial found: `problems` stop the run, `warnings` do not.

    `tried` has for each task its `environment`, its first `prompt`, the `response` that the rewards got, and their
    weighted sum `reward`, None if one failed.
    """

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    tried: list[dict[str, Any]] = field(default_factory=list)

    def add_problem(self, problem: str) -> None:
        """Add a problem unless it is known: several tasks may share a reward or an environment."""
        if problem not in self.problems:
            self.problems.append(problem)


MAX_SHOWN = 300
"""Characters of a prompt that `check_text` shows."""


def check_text(config: Config, file: Path, found: TrialResult) -> str:
    """What `laminar run --check` of the configuration `file` prints after the problems: warnings, what was tried."""
    lines = [f"warning: {each}" for each in found.warnings]
    for each in found.tried:
        reward = "no reward" if each["reward"] is None else f"the reward {each['reward']:.4g}"
        prompt = each["prompt"] if len(each["prompt"]) <= MAX_SHOWN else f"{each['prompt'][:MAX_SHOWN]}..."
        invented = " (invented: no agent is started)" if each["environment"] == AGENT else ""
        response = f"the response {each['response'][:MAX_SHOWN]!r}{invented}"
        lines.append(f"tried: task {each['task']!r}: {response} has {reward}; prompt:")
        lines += [f"  {line}" for line in prompt.splitlines()]
    if found.problems:
        lines.append(f"{file} cannot start: {counted(len(found.problems), 'problem')}")
        return "\n".join(lines)
    tasks = ", ".join(task.task_name for task in config.prompts.mixture)
    text = f"{file} can start: its {'' if config.emulated else 'model and '}prompts ({tasks}) work"
    if config.run.check_timeout_s:
        text += ", so do its rewards on the first prompts of each task"
        of_run = {spec.resolved_name for spec in config.rollout.environments}
        if used := of_run & {task.environment for task in config.prompts.mixture}:
            text += f", and reset and one step of its environments ({', '.join(sorted(used))})"
    else:
        text += "; its own code was not tried (run.check_timeout_s = 0)"
    return "\n".join([*lines, text])


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
