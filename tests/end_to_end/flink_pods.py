"""The pods of a run on Flink as processes: worker pools beside its task managers, and the pod that submits to it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli_w
from faults.network import Network
from pods import Cluster, Container, Pod
from small_runs import EMULATED

from benchmarks.flink_cluster import MANAGER, FlinkCluster
from infra.deploy.kubernetes.operators import flink as flink_resources
from infra.deploy.kubernetes.pods import USER
from infra.deploy.plan import DeploymentPlan
from infra.runners.flink import server_jars
from infra.runners.flink_jars import JARS
from pipelines.run.deployment import plan_of

POOL = "pool"


@dataclass
class FlinkOfPods(FlinkCluster):
    """A cluster whose worker pools are `containers`, by the names of the processes that they replace."""

    containers: Mapping[str, Container] = field(default_factory=dict)

    def log(self, name: str) -> Path:
        return self.containers[name].log if name in self.containers else super().log(name)

    def start_process(self, name: str) -> None:
        if name in self.containers:
            self.processes[name] = self.containers[name].start()
        else:
            super().start_process(name)

    def replace_pools(self, containers: Mapping[str, Container]) -> None:
        """End all worker pools, and start `containers` in their place."""
        for name in self.pools:
            self.kill(name)
        self.containers = containers
        for name in self.pools:
            self.start_process(name)


def flink_manifests(plan: DeploymentPlan) -> tuple[dict[str, Any], dict[str, Any]]:
    """The FlinkDeployment of `plan`, and the Deployment that submits the data plane."""
    found = {each["kind"]: each for each in flink_resources(plan)}
    return found["FlinkDeployment"], found["Deployment"]


def settings_of(name: str, servers: str, goal: int) -> dict[str, dict[str, Any]]:
    """An emulated run with two shards of score and of the buffer, which may change."""
    shards = {"shards": 2}
    return {
        **EMULATED,
        "run": {**EMULATED["run"], "name": name, "time_scale": 20.0},
        "kafka": {"bootstrap_servers": servers, "partitions": 4},
        "score": {**EMULATED["score"], **shards},
        "experience": {**EMULATED["experience"], **shards, "max_shards": 2},
        "trainer": {**EMULATED["trainer"], "optimizer_steps": goal},
    }


def deployed_plan(settings: Mapping[str, Mapping[str, Any]], slots: int, folder: Path) -> DeploymentPlan:
    """The deployment of a run with `settings` on a Flink with `slots`; its configuration is written to `folder`."""
    run = {**settings["run"], "folder": "/laminar/runs"}
    file = folder / "deployed.toml"
    file.write_text(tomli_w.dumps({**settings, "run": run, "deploy": {"flink_slots": slots}}))
    return plan_of(file)


@dataclass
class FlinkPods:
    """The pods of `plan` on the hosts of `cluster`."""

    cluster: Cluster
    plan: DeploymentPlan
    pools: Mapping[str, Container]
    """The worker pool beside each task manager, by the process of a FlinkCluster that it replaces."""
    submitter: Container
    """What submits the data plane."""

    def of_release(self, release: str) -> Mapping[str, Container]:
        """Worker pools whose image has `release` of Laminar, as its metadata says."""
        packages = self.cluster.folder / "packages"
        metadata = packages / f"laminar_rl-{release}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: laminar-rl\nVersion: {release}\n")
        folders = {**self.cluster.folders, "/release": packages}
        variables = {**self.cluster.variables, "PYTHONPATH": "/release"}
        other = replace(self.cluster, folders=folders, variables=variables)
        return _pools(self.plan, other, [name.removeprefix(f"{POOL} ") for name in self.pools], f"{release}-")


def pods_of(plan: DeploymentPlan, network: Network, folder: Path, tasks: Sequence[str], submitter: str) -> FlinkPods:
    """The pods of `plan`: worker pools on the hosts of `tasks`, and the one that submits on the host `submitter`.

    `folder` is new.
    """
    config, volume = folder / "config", folder / "volume"
    for each in (folder, config, volume):
        each.mkdir(mode=0o755)
    os.chown(volume, USER, USER)
    (config / "run.toml").write_text(plan.config)
    flink, submitting = flink_manifests(plan)
    # The image has the jars (`--build-arg JARS=flink`).
    jars = {str(each): each for each in (JARS.folder.parent, Path(os.path.commonpath(server_jars())))}
    cluster = Cluster(
        network,
        folder,
        config_maps={plan.name: config},
        secrets={},
        claims={plan.name: volume},
        nodes={},
        names={f"{flink['metadata']['name']}-rest": network.hosts[MANAGER].address},
        folders=jars,
        variables={"LAMINAR_JARS": str(JARS.folder.parent)},
    )
    pod = Pod(cluster, submitting["metadata"]["name"], submitting["spec"]["template"], 0, "", network.hosts[submitter])
    (container,) = pod.containers
    return FlinkPods(cluster, plan, _pools(plan, cluster, tasks), container)


def _pools(plan: DeploymentPlan, cluster: Cluster, tasks: Sequence[str], prefix: str = "") -> Mapping[str, Container]:
    template, pools = flink_manifests(plan)[0]["spec"]["taskManager"]["podTemplate"], {}
    for number, task in enumerate(tasks):
        pod = Pod(cluster, f"{prefix}{POOL}-{task}", template, number, task, cluster.network.hosts[task])
        (pools[f"{POOL} {task}"],) = (each for each in pod.containers if each.spec["name"] == POOL)
    return pools
