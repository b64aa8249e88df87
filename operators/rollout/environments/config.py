"""The configuration of a run's environments and their limits. Imports none of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from infra.name_lookup import suggest_name
from infra.setting_types import CheckedSettings, NonNegativeInt, Positive, PositiveInt

ENVIRONMENTS: Mapping[str, str] = {
    "calculator": "operators.rollout.environments.calculator:Calculator",
    "python": "operators.rollout.environments.python_tool:PythonTool",
    "guess": "operators.rollout.environments.guess:Guess",
    "openenv": "operators.rollout.environments.openenv_session:OpenEnvSession",
    "verifiers": "operators.rollout.environments.verifiers_rollout:VerifiersRollout",
}
"""The built-in environments, by name."""
PYTHON_SECONDS = 4.0
"""Default of `python`'s option `seconds`, the time that a program may take."""


@dataclass(frozen=True)
class EnvironmentSpec(CheckedSettings):
    """One environment. Raises ValueError naming the field that is invalid.

    `name` is one of `ENVIRONMENTS` or a user's class, `module:Class` or `file.py:Class` (see contract.py). Use only
    code that you trust: it runs with your permissions, within limits that catch mistakes, not attacks.
    """

    name: str
    """A built-in environment, `module:Class` or `file.py:Class`."""
    label: str = ""
    """The name that prompts use; empty: the name of the class or the environment."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""
    role: str = ""
    """Observations are messages of this role ("user", "tool") by the model's own chat template; empty: they are plain
    text after the turn."""
    turns: PositiveInt = 8
    """Maximum number of the model's turns in an episode."""
    turn_tokens: PositiveInt | None = None
    """Maximum tokens of one turn; unset: the remaining tokens of the response."""
    seconds: Positive = 10.0
    """Wall-clock limit of one step; beyond it the process is killed and the episode fails."""
    max_observation_chars: PositiveInt = 16_384
    """Maximum characters of an observation; a longer one fails its episode."""
    kv_megabytes: NonNegativeInt = 0
    """Memory of a replica, in MB, for the KV of trajectories that wait for this environment, so that the next turn need
    not recompute it. KV that does not fit is freed. vLLM ignores it and uses its prefix cache."""
    workers: PositiveInt = 2
    """Worker processes; each runs one step at a time."""
    memory_mb: PositiveInt = 1024
    """Address space limit of a worker process, in MiB."""

    def _check(self) -> None:
        if ":" not in self.name:
            if self.name not in ENVIRONMENTS:
                raise ValueError(
                    f"environments: there is no environment {self.name!r}{suggest_name(self.name, ENVIRONMENTS)}"
                )
        elif not all(self.name.rpartition(":")[::2]):
            raise ValueError(f"environments: name {self.name!r} must be 'module:Class' or 'file.py:Class'")
        programs = self.options.get("seconds", PYTHON_SECONDS)
        if self.name == "python" and isinstance(programs, int | float) and programs >= self.seconds:
            raise ValueError(
                f"environments: options.seconds = {programs:g} of python must be below seconds = {self.seconds:g}: a "
                "program that takes longer would fail its episode, instead of being an error that the model reads"
            )

    @property
    def resolved_name(self) -> str:
        """The name that prompts use."""
        return self.label or self.name.rpartition(":")[2]

    @property
    def target(self) -> str:
        """Its class as `module:Class`."""
        return ENVIRONMENTS.get(self.name, self.name)
