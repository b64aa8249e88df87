"""Which environments a run has, and what they may use up. Imports none of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from infra.name_lookup import suggest_name

ENVIRONMENTS: Mapping[str, str] = {
    "calculator": "operators.rollout.environments.calculator:Calculator",
    "python": "operators.rollout.environments.python_tool:PythonTool",
    "guess": "operators.rollout.environments.guess:Guess",
    "openenv": "operators.rollout.environments.openenv_session:OpenEnvSession",
    "verifiers": "operators.rollout.environments.verifiers_rollout:VerifiersRollout",
}
"""Those that come along, by name."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """One environment. Raises ValueError naming the field that does not fit.

    `name` is one of `ENVIRONMENTS` or a class of the user's, `module:Class` or `file.py:Class` (see contract.py), which
    must be code you trust: it runs as you, within limits that catch mistakes, not malice.
    """

    name: str
    label: str = ""
    """What prompts call it; empty: the class's or the environment's name."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the class."""
    role: str = ""
    """What is observed is a message of this role ("user", "tool") by the model's own chat template; empty: bare text
    behind the turn."""
    turns: int = 8
    """Turns of the model in an episode, at the most."""
    turn_tokens: int | None = None
    """Tokens of one turn at the most; None: what is left of the response."""
    seconds: float = 10.0
    """Wall-clock time of one step; then its process is killed, and the episode has failed."""
    max_observation_chars: int = 16_384
    """The longest observation that is taken; one that is longer fails its episode."""
    kv_megabytes: int = 0
    """Memory of a replica for the KV of trajectories that wait for this environment, so that it is not computed anew
    in the next turn. What does not fit is freed; vLLM keeps what it can by itself."""
    workers: int = 2
    """Processes; each takes one step at a time."""
    memory_mb: int = 1024
    """Address space of such a process, in MiB."""

    def __post_init__(self) -> None:
        if ":" not in self.name:
            if self.name not in ENVIRONMENTS:
                raise ValueError(
                    f"environments: there is no environment {self.name!r}{suggest_name(self.name, ENVIRONMENTS)}"
                )
        elif not all(self.name.rpartition(":")[::2]):
            raise ValueError(f"environments: name {self.name!r} must be 'module:Class' or 'file.py:Class'")
        for name in ("turns", "turn_tokens", "max_observation_chars", "workers", "memory_mb"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"environments: {name} of {self.resolved_name!r} must be at least 1, not {value}")
        if self.kv_megabytes < 0:
            raise ValueError(f"environments: kv_megabytes of {self.resolved_name!r} must not be negative")
        if not self.seconds > 0:
            raise ValueError(f"environments: seconds of {self.resolved_name!r} must be positive, not {self.seconds}")

    @property
    def resolved_name(self) -> str:
        """What prompts call it."""
        return self.label or self.name.rpartition(":")[2]

    @property
    def target(self) -> str:
        """Its class, as `module:Class`."""
        return ENVIRONMENTS.get(self.name, self.name)
