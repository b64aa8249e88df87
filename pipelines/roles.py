"""The roles of a run: each is one pipeline, in a process of its own or as a branch of one pipeline with others."""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from apache_beam import PCollection, Pipeline

    from infra.runners.options import RunnerName
    from pipelines.config import Config

PIPELINES = ("prompts", "placement", "rollout", "score", "experience", "trainer", "evaluation", "relay")
"""The pipelines of every run, in drain order."""

AGENT_PIPELINES = ("agents", "gateway")
"""Those of a run with agents."""

AUTOSCALER = "autoscaler"
"""That of a run with a section [autoscaling]."""

ALL_PIPELINES = (AUTOSCALER, *PIPELINES[:2], *AGENT_PIPELINES, *PIPELINES[2:])
"""All pipelines, in drain order."""

ROLE, ADMIN = "{role}", "admin"
"""`{role}` in the path of a client.properties file stands for the role that reads it; ADMIN is that of the commands."""

CANNOT_RUN = 2
"""Exit code of a role that cannot run with its configuration or log (`is_permanent`); it is not restarted."""

WITH_MODEL = {"evaluation", "relay", *AGENT_PIPELINES}
"""Pipelines that an emulated run omits, as it has no model and no weights."""

EMULATED = "emulated:"
"""Passed instead of the model's folder in an emulated run: the zygote then omits the imports of WITH_MODEL."""

SHARDED = {
    "agents": "process",
    "gateway": "process",
    "rollout": "process",
    "relay": "index",
    "score": "shard",
    "experience": "shard",
    "trainer": "rank",
}
"""Pipelines that may have several processes, and the parameter of `build` that takes the index."""

ALL_SHARDS = -1
"""The index of a role that is all shards of its pipeline together, as elements of one source."""

SCALED = ("score", "experience")
"""Pipelines whose shards are shares of a stream, so that one graph may have all of them."""

DATA_PLANE = "data-plane"
"""The name under which all roles that need no machine of their own are submitted as one graph."""


LIGHT = "light"
"""The process of the compact layout that runs the roles without a model as branches of one pipeline."""


def described(process: str) -> str:
    """How people read the name of a process: most have that of their role."""
    return f"{process} (the roles without a model)" if process == LIGHT else process


WITH_ENGINE = ("rollout", "trainer")
"""Pipelines that compute with the model. They never share a process with another role."""

WITH_STORE = (*WITH_ENGINE, "relay")
"""Pipelines that use the machine's weight store, and transfer weights or KV."""

ALONE = (*WITH_ENGINE, *AGENT_PIPELINES)
"""Pipelines that never share a process: those with an engine, and those that agents talk to."""

COMPACT_CORES = 4
"""Up to so many cores the layout `auto` is compact: processes compete for cores, and each costs memory."""


@dataclass(frozen=True)
class Role:
    """One shard of a pipeline of a run."""

    pipeline: str
    index: int = 0

    @property
    def name(self) -> str:
        if self.pipeline in (*SCALED, "trainer") and self.index in (0, ALL_SHARDS):
            return self.pipeline  # most runs have only one
        return f"{self.pipeline}-{self.index}" if self.pipeline in SHARDED else self.pipeline

    @property
    def build_arguments(self) -> dict[str, int]:
        """The arguments of `build` that choose the shard; none for all shards."""
        return {SHARDED[self.pipeline]: self.index} if self.pipeline in SHARDED and self.index != ALL_SHARDS else {}


RETRIES = 3
"""How often Flink starts a shard again before the job fails."""


def relay_of(machine: str) -> int:
    """The number of the relay of machine `machine`: 31 bits of a hash of its name, so no one has to assign numbers.

    Of 1,000 machines two have the same number with a probability of 1 in 4,000; the later relay would then fence the
    earlier one again and again, and both log it.
    """
    return int.from_bytes(hashlib.sha256(machine.encode()).digest()[:4], "big") >> 1


@dataclass(frozen=True)
class RoleProcess:
    """A process of a run on one machine; several `roles` are branches of one pipeline."""

    name: str
    roles: tuple[Role, ...]


def processes_of_pipeline(pipeline: str, count: int) -> list[RoleProcess]:
    """The first `count` processes of `pipeline`, each alone."""
    return [RoleProcess(role.name, (role,)) for role in (Role(pipeline, index) for index in range(count))]


def is_of_pipeline(name: str, pipeline: str) -> bool:
    """Whether the process `name` is one of `processes_of_pipeline`."""
    return name.partition("-")[0] == pipeline


def processes_of(config: Config) -> list[RoleProcess]:
    """The processes of a run on this machine, in drain order."""
    roles = roles_of(config)
    if config.run.is_compact(len(os.sched_getaffinity(0))):
        # The folds of one process take turns: a verifier of minutes must not hold up placement.
        apart = (*ALONE, *(["score"] if config.score.may_be_slow else []))
        light = tuple(role for role in roles if role.pipeline not in apart)
        others = [RoleProcess(role.name, (role,)) for role in roles if role.pipeline in apart]
        return [RoleProcess(LIGHT, light), *others]
    return [RoleProcess(role.name, (role,)) for role in roles]


def shares_process(name: str) -> bool:
    """Whether the role `name`, with or without its index, is in the process LIGHT of a compact run."""
    pipeline, _, index = name.partition("-")
    return pipeline in ALL_PIPELINES and pipeline not in ALONE and (not index or index.isdecimal())


def roles_of(config: Config) -> list[Role]:
    """The roles of a run on one machine, in drain order."""
    roles = []
    counts = {
        AUTOSCALER: int(config.autoscaling is not None),
        "agents": 0 if config.agents is None else config.agents.processes,
        "gateway": 0 if not config.has_gateway else 1 if config.gateway is None else config.gateway.processes,
        "rollout": config.rollout.processes,
        "score": config.score.shards,
        "experience": config.experience.shards,
        "trainer": config.trainer.ranks,
    }
    for pipeline in ALL_PIPELINES:
        if config.emulated and pipeline in WITH_MODEL:
            continue
        roles += [Role(pipeline, index) for index in range(counts.get(pipeline, 1))]
    return roles


def submitted_process(config: Config, pipeline: str, index: int = 0) -> RoleProcess:
    """What `laminar submit PIPELINE` runs in one graph: a role, all shards of a role, or the data plane of the run."""
    if pipeline != DATA_PLANE:
        role = Role(pipeline, index)
        return RoleProcess(role.name, (role,))
    apart = (*WITH_STORE, *AGENT_PIPELINES)
    pipelines = dict.fromkeys(role.pipeline for role in roles_of(config) if role.pipeline not in apart)
    return RoleProcess(DATA_PLANE, tuple(Role(each, ALL_SHARDS if each in SCALED else 0) for each in pipelines))


def pipelines_of(config: Config) -> tuple[str, ...]:
    """The pipelines of a run, on all machines, in drain order."""
    present = {
        *PIPELINES,
        *(AGENT_PIPELINES if config.has_gateway else ()),
        *(() if config.autoscaling is None else (AUTOSCALER,)),
    }
    return tuple(pipeline for pipeline in ALL_PIPELINES if pipeline in present)


def run_process(
    config: Config, process: RoleProcess, runner: RunnerName = "embedded", beam_options: Sequence[str] = ()
) -> None:
    """Run the roles of `process` until they are stopped or fail.

    Raises ConfigError, and the exception that made the pipeline fail.
    """
    from infra.runners.liveness import LIVENESS, alive_file
    from infra.runners.run import run_pipeline
    from operators.io.shards import close_shards

    if runner == "flink":
        named = f"--job_name={job_name(config, process)}"
        beam_options = [named, *flink_options(config, process), *beam_options]  # of those given twice the last is used
    logging.getLogger(__name__).info("starting %s", process.name)
    with LIVENESS.reporting(alive_file(liveness_file(config.run_folder, process.name))):
        if Role("trainer") in process.roles:  # rank 0, which has the model
            from pipelines.run_files import publish_run_files

            publish_run_files(replace(config, kafka=config.kafka.for_role("trainer")))
        run_pipeline(graph_of(config, process, runner), runner, beam_options, close_shards)


def is_permanent(error: Exception) -> bool:
    """Whether another start would raise `error` again: a process that ends with it exits with CANNOT_RUN."""
    from infra.kafka.admin import OtherPartitions
    from infra.kafka.log_gaps import CannotResume
    from operators.prompts.question import SourceError
    from operators.rollout.engine import CannotGenerate
    from operators.trainer.assembly import CannotTrain
    from operators.trainer.persist import CheckpointError, CheckpointsUnavailable
    from pipelines.config import ConfigError
    from schemas.release import NewerRelease, NotInRelease, OldRelease

    own = (CannotGenerate, CannotResume, CannotTrain, CheckpointError)
    kinds = (*own, ConfigError, SourceError, OldRelease, NewerRelease, NotInRelease, OtherPartitions)
    return isinstance(error, kinds) and not isinstance(error, CheckpointsUnavailable)


def job_name(config: Config, process: RoleProcess) -> str:
    """The beginning of the names of the jobs of `process` on a cluster, by which its next submission cancels the last.

    It has a hash of Kafka's address: another run of this name, at another Kafka, is not this run. The address is that
    of the first role: where the job is submitted the roles' properties exist, and perhaps not those of the commands.
    """
    client = config.kafka.for_role(process.roles[0].pipeline).client()
    address = hashlib.sha256(client.bootstrap_servers.encode()).hexdigest()
    return f"laminar-{config.run.name}-{process.name}-{address[:8]}"


def flink_options(config: Config, process: RoleProcess) -> list[str]:
    """The options of Flink that depend on the shards in the graph of `process`: none for a single one.

    There are as many subtasks as shards of a role. A lost task manager fails each of its shards, and Flink counts every
    failure.
    """
    counts = {"score": config.score.shards, "experience": config.experience.shards}
    shards = [counts.get(role.pipeline, 1) if role.index == ALL_SHARDS else 1 for role in process.roles]
    if sum(shards) == 1:
        return []
    return [f"--parallelism={max(shards)}", f"--number_of_execution_retries={RETRIES * sum(shards)}"]


def graph_of(config: Config, process: RoleProcess, runner: RunnerName) -> Callable[[Pipeline], None]:
    """The function that adds the roles of `process` to a pipeline for `runner`."""
    builds = {role.name: partial(build_role, config=config, role=role) for role in process.roles}
    if len(builds) == 1:
        (build,) = builds.values()
        return build
    from pipelines.branches import build_branches, build_side_by_side

    # The embedded runner would never come to a second source.
    return partial(build_branches if runner == "embedded" else build_side_by_side, builds=builds)


def import_pipeline(role: Role) -> ModuleType:
    """The module of the pipeline of `role`, which imports Beam and, for some, torch."""
    return importlib.import_module(f"pipelines.{role.pipeline}")


def build_role(begin: Pipeline | PCollection, config: Config, role: Role) -> None:
    """Add the graph of `role` to a pipeline, or to polls that it has read. Raises ConfigError."""
    from pipelines.config import ConfigError
    from pipelines.shards import with_relay_token

    config = replace(config, kafka=config.kafka.for_role(role.pipeline))
    build: Callable[..., None] = import_pipeline(role).build
    try:
        if role.pipeline in WITH_STORE:
            config = with_relay_token(config, config.run_folder, create=True)
        build(begin, config=config, **role.build_arguments)
    except (ValueError, OSError) as error:  # nothing runs yet, so the configuration is the cause
        raise ConfigError(f"{role.name} cannot be built: {error}") from error


def liveness_file(run_folder: Path, name: str) -> Path:
    """The file in which the process `name` reports its liveness and progress, see `infra.runners.liveness`."""
    return run_folder / "alive" / f"{name}.json"
