"""The processes of a run as plain values, from which all kinds of deployment files are generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CONFIG = "/etc/laminar/run.toml"
"""Path of the run's configuration on a machine or in a container."""
SECRETS = "/etc/laminar-secrets"
"""Folder of tokens and passwords."""
ALIVE = "/tmp/laminar-alive"
"""Path of a role's liveness file, see `infra.runners.liveness`."""
SILENT_MIN = 5
"""Minutes without a report after which a role is restarted. Steps have their own budgets, see `[progress]`."""


@dataclass(frozen=True)
class Unit:
    """A role: `count` processes; if it is `indexed`, they have indexes from `first` on.

    Resource requests are per process: processors, memory in GiB, accelerators. Units with the same `place` share a
    machine's weights. Other processes connect to `port`, if it is set.
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
        """The command line; `index` may be a variable of the deployment tool."""
        return ["laminar", "submit", self.name, CONFIG, *(["--index", index] if self.indexed else [])]


@dataclass(frozen=True)
class DeploymentPlan:
    """The units of a run, and other values in its deployment files."""

    run: str
    config: str
    """The text of its configuration."""
    units: Sequence[Unit]
    image: str = "laminar:latest"
