"""The processes of a run as plain values, from which all kinds of deployment files are generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from infra.deploy.config import DeployConfig
from infra.deploy.role_acls import EXPORT, PEOPLE
from infra.kafka.acls import Acl
from infra.kafka.admin import TopicSpec
from infra.storage import HTTPS

CONFIG = "/etc/laminar/run.toml"
"""Path of the run's configuration in a container."""
SECRETS = "/etc/laminar-secrets"
"""Folder of tokens and passwords."""
ALIVE = "/tmp/laminar-alive"
"""Path of a role's liveness file, see `infra.runners.liveness`; the files of a group have a number in addition."""
SILENT_MIN = 5
"""Minutes without a report after which a role is restarted. Steps have their own budgets, see `[progress]`."""
METRICS_PORT = 9464
GATEWAY, AGENTS = "gateway", "agents"
"""The units that agents talk to, and that run them."""
DATA_PLANE = "data-plane"
"""What `laminar submit` runs in one graph: all roles that need neither weights nor a place for agents."""

Placement = Literal["single", "indexed", "machine"]
VolumeUse = Literal["none", "read", "write"]


@dataclass(frozen=True)
class Unit:
    """A role. `placement`: one process, `count` containers with indices, or one process on each machine with weights.

    A container runs `group` processes. Resources are per container: processors, memory in GiB, GPUs. With `weights` it
    maps its machine's weight store; `volume` is its use of the run's volume. It may change the number of pods of the
    unit `scales` ("": of none), and has `grace_s` seconds to end. Other pods connect to its `port` (0: to none), and to
    its first one as `first_host` ("": by its own name).
    """

    name: str
    count: int = 1
    placement: Placement = "single"
    group: int = 1
    cpus: float = 1.0
    memory_gib: int = 2
    gpus: int = 0
    weights: bool = False
    volume: VolumeUse = "none"
    scales: str = ""
    grace_s: int = 60
    port: int = 0
    first_host: str = ""

    def command(self, index: str = "0") -> list[str]:
        """The command line; `index` (of the container, or the machine's name) may be a deployment tool's variable."""
        where = {"single": [], "indexed": ["--index", index], "machine": ["--machine", index]}[self.placement]
        group = ["--group-size", str(self.group)] if self.group > 1 else []
        return ["laminar", "submit", self.name, CONFIG, *where, *group]


@dataclass(frozen=True)
class DeploymentPlan:
    """The units of a run, and other values in its deployment files."""

    run: str
    config: str
    """The text of its configuration."""
    units: Sequence[Unit]
    deploy: DeployConfig = field(default_factory=DeployConfig)
    cluster_config: str = ""
    """The text of its configuration for Kubernetes, whose Kafka has several brokers; that of compose.yaml has one."""
    brokers: str = "kafka:9092"
    authenticated: bool = False
    """Whether each role has a client.properties file, named after the role, among the secrets."""
    restore_s: float = 3600.0
    """How long a role may take before its first step."""
    audit_every_s: float = 120.0
    """How often the process that serves the metrics audits the run; 0: never."""
    transaction_timeout_s: float = 60.0
    """How long a transaction of a role may be open: its audits wait for it."""
    storage_ports: Sequence[int] = (HTTPS,)
    """The ports of object stores."""
    relay_files: Sequence[str] = ()
    """Paths of the relays' token and certificates, below SECRETS."""
    gateway_files: Sequence[str] = ()
    """Paths of the gateway's certificate and key, below SECRETS."""
    agent_files: Sequence[str] = ()
    """Paths of the secret of episodes' keys and of the gateway's authority, below SECRETS: for gateway and agents."""
    data_plane: Sequence[str] = ()
    """The units that `laminar submit data-plane` runs in one graph."""
    topics: Sequence[TopicSpec] = ()
    acls: Sequence[Acl] = ()
    note: str = ""
    """For the person who deploys: what the plan could not be computed from."""

    @property
    def name(self) -> str:
        """The prefix of all names in the cluster."""
        return resource_prefix(self.run)

    def resource_name(self, unit: str) -> str:
        """The name of the resources of the unit or job `unit`."""
        return f"{self.name}-{unit}"

    @property
    def workloads(self) -> Sequence[Unit]:
        """The units with pods of their own on Kubernetes: with Flink the data plane is one job."""
        apart = self.data_plane if self.deploy.flink_slots else ()
        return [unit for unit in self.units if unit.name not in apart]

    @property
    def gpus(self) -> Mapping[str, int]:
        """The GPUs of all containers of the units that have some, by unit."""
        return {unit.name: unit.gpus * unit.count for unit in self.units if unit.gpus}

    @property
    def fits_one_machine(self) -> bool:
        """Whether one machine has enough GPUs."""
        return sum(self.gpus.values()) <= self.deploy.gpus_per_machine

    @property
    def gateway_port(self) -> int:
        """The port of the run's gateway; 0 without one."""
        return next((unit.port for unit in self.units if unit.name == GATEWAY), 0)

    def gateway_url(self, host: str) -> str:
        """The URL of the run's gateway at `host`, for containers of gateway and agents."""
        return f"https://{host}:{self.gateway_port}/v1"

    def as_user(self, user: str) -> list[str]:
        """The options of a command that connects as Kafka's user `user`."""
        return ["-b", self.brokers, *(["-F", f"{SECRETS}/{user}.properties"] if self.authenticated else [])]

    def metrics_command(self) -> list[str]:
        """The command line of the exporter of the run's metrics to Prometheus, which audits the run, too."""
        serve = ["laminar", "metrics", "serve", "--run", self.run, "--host", "0.0.0.0", "--port", str(METRICS_PORT)]
        audit = ["--audit-every", f"{self.audit_every_s:g}", *self._transaction_timeout()]
        return [*serve, *audit, *self.as_user(PEOPLE)]

    def export_command(self) -> list[str]:
        """The command line that writes the experiences of the run so far to its volume."""
        folder = f"{self.deploy.volume_path}/exports/{self.run}/experiences"
        export = ["laminar", "export", "experiences", folder, "--run", self.run]
        return [*export, *self._transaction_timeout(), *self.as_user(EXPORT)]

    def _transaction_timeout(self) -> list[str]:
        """The option of commands whose pods do not have the run's configuration."""
        return ["--transaction-timeout", f"{self.transaction_timeout_s:g}"]


def resource_prefix(run: str) -> str:
    """The prefix of the names of run `run` in a cluster: lower-case letters, digits and '-'."""
    return f"laminar-{run}".lower().replace("_", "-").rstrip("-")
