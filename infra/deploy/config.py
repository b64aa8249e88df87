"""The `[deploy]` section: what deployment files say about the cluster that will run the roles."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Annotated, Literal

from annotated_types import Ge, Le

from infra.kafka.broker_jars import KAFKA_VERSION
from infra.runners.flink_jars import FLINK
from infra.setting_types import CheckedSettings, NonNegativeInt, Positive, PositiveInt

_PeerPort = Annotated[int, Ge(1), Le(65535)]
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class DeployConfig(CheckedSettings):
    """Images, storage and machines of a deployment. Raises ValueError naming the invalid field."""

    image: str = "laminar:latest"
    """The image of all roles, see the Dockerfile."""
    kafka_image: str = f"apache/kafka:{KAFKA_VERSION}"
    """The image of Kafka in the compose file; a digest pins it (`apache/kafka@sha256:…`), as in the others."""
    flink_image: str = f"flink:{FLINK}"
    """The image of Flink, see `flink_slots`; of the same version."""
    image_pull_secret: str = ""
    """The Secret with the image registry's password; empty: none."""
    namespace: str = "laminar"
    """The Kubernetes namespace."""
    volume: Literal["claim", "claimed"] = "claim"
    """The volume for the model, checkpoints and exports: `claim` creates a PersistentVolumeClaim, `claimed` uses an
    existing one of the same name."""
    volume_path: str = "/laminar"
    """Where that volume is mounted in every container; model.path and run.folder are folders below it."""
    volume_gib: PositiveInt = 200
    """Size of the claim."""
    volume_access: Literal["ReadWriteMany", "ReadWriteOnce"] = "ReadWriteMany"
    """`ReadWriteOnce` only if all pods run on one machine."""
    storage_class: str = ""
    """Storage class of the claim; empty: the cluster's default."""
    shared_memory: str = "/dev/shm"
    """A machine's folder in memory, in which its relay, rollouts and trainer ranks share weights."""
    node_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the machines for relays, rollouts and trainer ranks; each of these machines gets a relay, and without
    labels every machine, also one without GPUs."""
    tolerations: tuple[str, ...] = ("nvidia.com/gpu",)
    """Taints of these machines that their pods tolerate."""
    gpu_resource: str = "nvidia.com/gpu"
    """The resource by which containers request GPUs."""
    gpus_per_machine: PositiveInt = 8
    """The ranks of a trainer with GPUs run in pods of up to so many, one pod a machine; a compose file has no more."""
    memory_gib: Mapping[str, PositiveInt] = field(default_factory=dict)
    """GiB of memory that a process of a role requests, by role; else computed from the model."""
    cpus: Mapping[str, Positive] = field(default_factory=dict)
    """Processors that a process of a role requests, by role; else 4 for rollout, 8 for trainer, 1 for others. There is
    no limit: a process uses those that are free."""
    model_folder: str = ""
    """A copy of the model on this machine, whose sizes the memory requests are computed from; empty: model.path."""
    network_policies: bool = True
    """Whether pods may connect only to those that they need."""
    extra_egress_ports: tuple[_PeerPort, ...] = ()
    """Ports to which network policies let pods connect beside those of kafka.bootstrap_servers and object stores: of
    brokers that advertise others, or of an HDFS."""
    gateway_service: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """The Service of a run's gateway. `ClusterIP`: only the run's agents may connect; else also agents outside of the
    cluster, and of the machine of a compose file (`laminar agents play`)."""
    flink_slots: NonNegativeInt = 0
    """Write a FlinkDeployment for the Flink operator with so many task managers of one slot, each with a pool of
    workers beside it, and a Deployment that submits the data plane as a job of all of them; 0: none."""
    flink_operator_namespace: str = ""
    """Where the Flink operator runs, which network policies let connect to Flink; empty: in `namespace`."""
    prometheus: bool = False
    """Write a ServiceMonitor for the Prometheus operator."""
    strimzi_cluster: str = ""
    """Write a KafkaTopic for each topic and a KafkaUser for each role, for this cluster of the Strimzi operator."""

    def _check(self) -> None:
        for name in ("namespace", "flink_operator_namespace"):
            value = getattr(self, name)
            if not _LABEL.fullmatch(value) and (value or name == "namespace"):
                raise ValueError(f"{name} must be 1-63 lower-case letters, digits or '-', not {value!r}")
        for name in ("volume_path", "shared_memory"):
            path = PurePosixPath(getattr(self, name))
            if not path.is_absolute() or path == PurePosixPath("/"):
                raise ValueError(f"{name} must be an absolute path of a folder, not {getattr(self, name)!r}")
        for name in ("image", "kafka_image", "flink_image"):
            if not getattr(self, name):
                raise ValueError(f"{name} must name an image")
