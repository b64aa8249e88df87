"""What is to run where, as plain values: deployment files of every kind are made of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CONFIG = "/etc/laminar/run.toml"
"""Where a machine or a container has the run's configuration."""
SECRETS = "/etc/laminar-secrets"
"""Where it has tokens and passwords."""
ALIVE = "/tmp/laminar-alive"
"""Where a role reports that it is alive, see `infra.runners.liveness`."""
SILENT_MIN = 5
"""Minutes without a report after which a role is started again. Steps have budgets of their own, see `[progress]`."""


@dataclass(frozen=True)
class Unit:
    """A role: `count` processes, told apart by an index from `first` on where it is `indexed`.

    Requests are per process: processors, memory in GiB, accelerators. What shares a `place` shares a machine's weights.
    Others reach it at `port`, if it has one.
    """

    name: str
    count: int = 1
    indexed: bool = False
    cpus: float = 1.0
    memory_gib: int = 2
    gpus: int = 0
    place: str = ""
    first: int = 0
    port: int = 0

    def command(self, index: str = "0") -> list[str]:
        """What runs it; `index` may be a variable of whoever starts it."""
        return ["laminar", "submit", self.name, CONFIG, *(["--index", index] if self.indexed else [])]


@dataclass(frozen=True)
class DeploymentPlan:
    """A run's units, and what else its files name."""

    run: str
    config: str
    """The text of its configuration."""
    units: Sequence[Unit]
    image: str = "laminar:latest"
