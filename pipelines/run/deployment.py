"""Deployment files for the roles of a run: compose, Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from infra.deploy.compose import compose_file
from infra.deploy.kubernetes import manifests
from infra.deploy.units import DeploymentPlan, Unit
from pipelines.config import Config, load_config
from pipelines.roles import SHARDED, roles_of

EXAMPLE = Path("examples/deployed.toml")
"""The configuration from which infra/deploy/files is generated."""
_RESOURCES: Mapping[str, tuple[float, int]] = {"rollout": (4.0, 16), "trainer": (8.0, 32), "relay": (1.0, 8)}
"""CPUs and memory in GiB; 1 CPU and 2 GiB for all others."""
_WITH_WEIGHTS = ("rollout", "trainer")


def plan_of(file: Path) -> DeploymentPlan:
    """The deployment of the configuration in `file`, which must set run.name. Raises ConfigError."""
    config = load_config(file)
    return DeploymentPlan(config.run.name, file.read_text(encoding="utf-8"), units_of(config))


def units_of(config: Config) -> list[Unit]:
    """The roles of `config` as units, in drain order."""
    counts: dict[str, int] = {}
    for role in roles_of(config):
        counts[role.pipeline] = counts.get(role.pipeline, 0) + 1
    gpus = 0 if config.emulated else config.rollout.engine == "vllm"
    units = []
    for name, count in counts.items():
        cpus, memory = _RESOURCES.get(name, (1.0, 2))
        units.append(
            Unit(
                name,
                count,
                indexed=name in SHARDED,
                cpus=cpus,
                memory_gib=memory,
                gpus=int(gpus) if name in _WITH_WEIGHTS else 0,
                place="weights" if name in _WITH_WEIGHTS else "",
                port=config.relay.port if name == "relay" else 0,
            )
        )
    return units


def files_of(plan: DeploymentPlan) -> dict[str, str]:
    """All deployment files of `plan`, by path."""
    return {"compose.yaml": compose_file(plan), "kubernetes.yaml": manifests(plan), "run.toml": plan.config}
