"""The configuration of the agents of a run, section `[agents]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from infra.setting_types import CheckedSettings, FinitePositive, NonNegativeInt, PositiveInt


@dataclass(frozen=True)
class AgentsConfig(CheckedSettings):
    """The program that plays the episodes of prompts with `environment = "agent"`: a command, a function, or neither,
    if agents elsewhere do. Raises ValueError naming the field that is invalid.

    Use only code that you trust: it runs with your permissions.
    """

    command: tuple[str, ...] = ()
    """The command of one agent. It gets OPENAI_BASE_URL, OPENAI_API_KEY, LAMINAR_TASK (JSON; LAMINAR_TASK_FILE has a
    larger one, too) and LAMINAR_REPORT, a file to which it may write {"reward": 1.0, "answer": "…"}, and "rewards" with
    a number for the ids of responses."""
    function: str = ""
    """`module:function` or `file.py:function`, called as function(client, task) with a client of the package openai;
    it returns a reward, an answer, {"reward": …, "rewards": …, "answer": …} or nothing."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables of agents."""
    concurrency: PositiveInt = 16
    """Agents that run at once."""
    timeout_s: FinitePositive = 600.0
    """An agent that runs for so many seconds is killed; its attempt has failed."""
    memory_limit_mb: PositiveInt | None = None
    """Memory of its own, in MiB, of each process of an agent that this run starts: an allocation beyond it fails.
    Unset: no limit."""
    retries: NonNegativeInt = 1
    """Attempts after a failed one. Requests that a failed attempt made get their recorded responses."""
    transcripts: bool = True
    """Keep the output of each agent in the run's folder, `agents/EPISODE.log`. Otherwise only the last lines of those
    that fail are shown, in the log of the role."""
    processes: PositiveInt = 1
    """Processes that run agents; each runs `concurrency` of them."""

    def _check(self) -> None:
        if self.command and self.function:
            raise ValueError("command and function: set one of them")
        if self.function and not all(self.function.rpartition(":")[::2]):
            raise ValueError(f"function {self.function!r} must be 'module:function' or 'file.py:function'")

    @property
    def runs_here(self) -> bool:
        """Whether this run starts agents itself."""
        return bool(self.command or self.function)
