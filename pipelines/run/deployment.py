"""Deployment files for the roles of a run: compose, Kubernetes; and the memory that its containers request."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import tomli_w

from infra.deploy.compose import compose_file
from infra.deploy.kubernetes import kubernetes_files
from infra.deploy.plan import AGENTS, CONFIG, GATEWAY, DeploymentPlan, Placement, Unit, VolumeUse, resource_prefix
from infra.deploy.role_acls import role_acls
from infra.listening import is_loopback
from infra.models.sizes import ELEMENT_BYTES, kv_values, readable_config
from infra.sizes import GIB
from infra.storage import HTTPS, port_of
from operators.agents.agent_process import AUTHORITY
from operators.gateway.config import GatewayConfig
from operators.trainer.memory_plan import PINNED, offloaded_bytes, plan_rank, shape_of
from pipelines.config import Config, read_config
from pipelines.roles import AUTOSCALER, DATA_PLANE, SHARDED, pipelines_of, roles_of, submitted_process
from pipelines.run.deployment_checks import check_deployable, is_secret, ranks_of_container
from pipelines.run.topics import topic_spec
from pipelines.sequence_lengths import longest_sequence
from schemas.topics import CATALOGUE

COMPOSE = "compose.yaml"
EXAMPLE = Path("examples/deployed.toml")
"""The configuration from which infra/deploy/files is generated."""
REPLICAS = 3
"""Copies of a record from which on topics get a majority as min.insync.replicas; on Kubernetes the default."""
_CPUS: Mapping[str, float] = {"rollout": 4.0, "trainer": 8.0}
"""Processors of a container; 1 for all others."""
_AGENT_GIB = 0.25
"""A program of an agent, of those that run at once, beside the process that starts them."""
_WITH_WEIGHTS = ("rollout", "trainer", "relay")
_VOLUME: Mapping[str, VolumeUse] = {"trainer": "write", "placement": "none", "relay": "none"}
"""The use of the volume: the trainer writes checkpoints, all others read the model, data or code."""


def plan_of(file: Path, changes: tuple[str, ...] = ()) -> DeploymentPlan:
    """The deployment of the configuration in `file`. Raises ConfigError if it cannot be deployed, with all problems."""
    draft = read_config(file, changes)
    check_deployable(draft, file)
    config, text = draft.config, file.read_text(encoding="utf-8")
    chosen = config.kafka.replication_factor != -1 or "replication_factor" in tomllib.loads(text).get("kafka", {})
    on_cluster = config if chosen else replace(config, kafka=replace(config.kafka, replication_factor=REPLICAS))
    relay, gateway = config.relay, config.gateway or GatewayConfig()
    authority = "" if config.agents is None else config.agents.env.get(AUTHORITY, "")
    remote = [each for each in (relay.object_store, config.trainer.checkpoint_folder) if "://" in each]
    plan = DeploymentPlan(
        run=config.run.name,
        config=text,
        cluster_config=text if chosen else _with_copies(text),
        units=units_of(config),
        deploy=config.deploy,
        brokers=config.kafka.bootstrap_servers,
        authenticated=bool(config.kafka.client_properties),
        restore_s=config.progress.restore_s,
        audit_every_s=config.run.audit_every_s,
        transaction_timeout_s=config.kafka.transaction_timeout_s,
        storage_ports=sorted({HTTPS, *map(port_of, remote)}),
        relay_files=tuple(filter(None, (relay.token_file, relay.certificate_file, relay.authority_file))),
        gateway_files=tuple(filter(None, (gateway.certificate_file, gateway.key_file))),
        agent_files=tuple(filter(None, (gateway.secret_file, authority if is_secret(authority) else ""))),
        data_plane=tuple(role.pipeline for role in submitted_process(config, DATA_PLANE).roles),
        topics=[topic_spec(on_cluster, topic) for topic in CATALOGUE.values()],
        acls=role_acls(config.run.name, pipelines_of(config)),
    )
    notes = (
        _missing_model(config),
        _few_copies(on_cluster),
        _relays_everywhere(plan),
        _agents_elsewhere(config),
        _no_compose_file(plan),
    )
    return replace(plan, note="\n".join(filter(None, notes)))


def _with_copies(text: str) -> str:
    """The configuration `text`, which does not say how many copies topics get, for a Kafka with a broker for each."""
    table = tomllib.loads(text)
    wanted = {**table, "kafka": {**table.get("kafka", {}), "replication_factor": REPLICAS}}
    line = f"replication_factor = {REPLICAS}  # of `laminar deploy`, for Kubernetes alone\n"
    changed = re.sub(r"^\[kafka\][^\n]*\n", lambda header: header[0] + line, text, count=1, flags=re.MULTILINE)
    return changed if tomllib.loads(changed) == wanted else tomli_w.dumps(wanted)  # the section has another form


def _missing_model(config: Config) -> str:
    """A note for the user if the model's files are not on this machine; else empty."""
    if config.emulated or model_copy(config):
        return ""
    return (
        f"the model {config.model.path} is not on this machine, so memory requests are defaults: set "
        "deploy.model_folder to a copy of it"
    )


def _few_copies(config: Config) -> str:
    """A note if an acknowledged record may be on a single broker of a cluster; else empty."""
    if config.kafka.replication_factor >= REPLICAS:
        return ""
    return (
        f"kafka.replication_factor is {config.kafka.replication_factor}: topics get no min.insync.replicas, so the "
        f"loss of a broker may lose records; with {REPLICAS} brokers set {REPLICAS}, or leave it out for Kubernetes"
    )


def _relays_everywhere(plan: DeploymentPlan) -> str:
    """A note if machines without GPUs get a relay, too: relays request none. Else empty."""
    if not plan.gpus or plan.deploy.node_labels:
        return ""
    return (
        "deploy.node_labels is empty: on Kubernetes every machine gets a relay, with the weights in its memory, "
        "even one without GPUs; name the labels of the machines with GPUs, such as "
        '{ "nvidia.com/gpu.present" = "true" } of NVIDIA\'s GPU operator'
    )


def _agents_elsewhere(config: Config) -> str:
    """A note on what agents of other machines need, if the run starts none itself; else empty."""
    if config.gateway is None or (config.agents is not None and config.agents.runs_here):
        return ""
    gateway = f"{resource_prefix(config.run.name)}-{GATEWAY}"
    return (
        f"agents that run elsewhere need only the gateway's address (its Service {gateway}, port {config.gateway.port};"
        " deploy.gateway_service opens it to the outside) and the worker key, which "
        f"`kubectl exec -n {config.deploy.namespace} {gateway}-0 -- laminar agents serve --config {CONFIG}` shows, in "
        f"compose `docker compose exec {GATEWAY}-0 …`; then `laminar agents play https://HOST:PORT/v1 -- COMMAND`"
    )


def _no_compose_file(plan: DeploymentPlan) -> str:
    """A note that the run is too large for one machine; else empty."""
    if plan.fits_one_machine:
        return ""
    listed = ", ".join(f"{name} {gpus}" for name, gpus in plan.gpus.items())
    return (
        f"no compose.yaml is written: the containers need {sum(plan.gpus.values())} GPUs ({listed}), and a machine has "
        f"{plan.deploy.gpus_per_machine} (deploy.gpus_per_machine)"
    )


def units_of(config: Config) -> list[Unit]:
    """The roles of `config` as units, in drain order."""
    counts: dict[str, int] = {}
    for role in roles_of(config):
        counts[role.pipeline] = counts.get(role.pipeline, 0) + 1
    memory = host_memory(config)
    return [_unit(config, name, count, memory) for name, count in counts.items()]


def _unit(config: Config, name: str, count: int, memory: Mapping[str, int]) -> Unit:
    agents, autoscaling = config.agents, config.autoscaling
    programs = agents.concurrency * _AGENT_GIB if name == AGENTS and agents is not None and agents.runs_here else 0.0
    gib = memory.get(name, PROCESS_GIB) + math.ceil(programs)
    scales_pods = name == AUTOSCALER and autoscaling is not None and autoscaling.actuator == "kubernetes"
    on_gpus = config.trainer.device.startswith("cuda")
    rollouts_too = on_gpus or config.rollout.engine == "vllm"
    gpus = {"trainer": int(on_gpus), "rollout": config.rollout.tensor_parallel * rollouts_too}
    group = ranks_of_container(config) if name == "trainer" else 1
    own, rank_0 = config.deploy.memory_gib.get(name), config.trainer.rank_0_host
    return Unit(
        name,
        count // group,
        placement=_placement(name),
        group=group,
        cpus=group * config.deploy.cpus.get(name, _CPUS.get(name, 1.0)),
        memory_gib=gib if own is None else group * own,
        gpus=0 if config.emulated else group * gpus.get(name, 0),
        weights=name in _WITH_WEIGHTS and not config.emulated,
        volume=_VOLUME.get(name, "read"),
        scales="rollout" if scales_pods else "",
        grace_s=max(Unit.grace_s, math.ceil(config.rollout.termination_notice_s))
        if name == "rollout"
        else Unit.grace_s,
        port=config.gateway.port if name == GATEWAY and config.gateway is not None else 0,
        first_host=rank_0 if name == "trainer" and not is_loopback(rank_0) else "",
    )


def _placement(name: str) -> Placement:
    if name == "relay":
        return "machine"
    return "indexed" if name in SHARDED else "single"


def files_of(plan: DeploymentPlan) -> dict[str, str]:
    """All deployment files of `plan`, by path; with a compose file if one machine has enough GPUs."""
    compose = {COMPOSE: compose_file(plan), "run.toml": plan.config} if plan.fits_one_machine else {}
    return {**compose, **kubernetes_files(plan)}


PROCESS_GIB = 2
"""A process with its libraries."""
_WITHOUT_MODEL: Mapping[str, int] = {"rollout": 16, "trainer": 32, "relay": 8}


def model_copy(config: Config) -> Path | None:
    """The model's files on this machine; None if they are not here."""
    folder = Path(config.deploy.model_folder or config.model.path or "/")
    return folder if (folder / "config.json").is_file() else None


def host_memory(config: Config) -> Mapping[str, int]:
    """GiB of one container by role; PROCESS_GIB for all others. Raises ValueError if the model's files are invalid.

    A machine's weight versions count for the relay and for the trainer, once for all ranks in its container: a page of
    the store is charged to the container that writes it. A rollout holds a copy of the weights while it loads them; on
    a CPU it also has the KV cache.
    """
    folder, ranks = model_copy(config), ranks_of_container(config)
    if config.emulated:
        return {}
    if folder is None:
        return {**_WITHOUT_MODEL, "trainer": _WITHOUT_MODEL["trainer"] * ranks}
    shape = shape_of(folder)
    weights = shape.parameters * ELEMENT_BYTES[config.rollout.weights_dtype]
    stored = weights * (config.relay.keep_versions + 1)
    on_gpu = config.trainer.device.startswith("cuda")
    rank = (
        2 * shape.largest_layer * 4 + PINNED * offloaded_bytes(shape, config.trainer)
        if on_gpu
        else plan_rank(shape, config.trainer, longest_sequence(config)).total
    )
    rollout = config.rollout
    capacity = rollout.kv_capacity or rollout.most_slots * (rollout.context or 4096)
    kv = 0 if on_gpu else kv_values(readable_config(folder)) * capacity * ELEMENT_BYTES[rollout.weights_dtype]
    others = (ranks - 1) * PROCESS_GIB * GIB
    trainer = stored + ranks * rank + others
    sizes = {"relay": stored, "trainer": trainer, "rollout": weights + kv + rollout.kv_megabytes * 10**6}
    return {role: PROCESS_GIB + math.ceil(size / GIB) for role, size in sizes.items()}
