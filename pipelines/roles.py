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

from infra.escaping import EscapingFormatter

if TYPE_CHECKING:
    from apache_beam import PCollection, Pipeline

    from infra.runners.options import Runner
    from pipelines.config import Config

PIPELINES = ("prompts", "placement", "rollout", "score", "experience", "trainer", "evaluation", "relay")
"""The pipelines of every run, in drain order."""

AGENT_PIPELINES = ("agents", "gateway")
"""Those of a run with agents."""

ALL_PIPELINES = (*PIPELINES[:2], *AGENT_PIPELINES, *PIPELINES[2:])
"""All pipelines, in drain order."""

ROLE, ADMIN = "{role}", "admin"
"""`{role}` in the path of a client.properties file stands for the role that reads it; ADMIN is that of the commands."""

CANNOT_RUN = 2
"""Exit code of a role that cannot run with its configuration; it is not restarted."""

WITH_MODEL = {"evaluation", "relay", *AGENT_PIPELINES}
"""Pipelines that an emulated run omits, as it has no model and no weights."""

EMULATED = "emulated:"
"""Passed instead of the model's folder in an emulated run: the zygote then omits the imports of WITH_MODEL."""

SHARDED = {
    "agents": "process",
    "gateway": "process",
    "rollout": "process",
    "relay": "index",
    "experience": "shard",
    "trainer": "rank",
}
"""Pipelines that may have several processes, and the parameter of `build` that takes the index."""


LIGHT = "light"
"""The process of the compact layout that runs the roles without a model as branches of one pipeline."""

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
        if self.pipeline in ("experience", "trainer") and not self.index:
            return self.pipeline  # most runs have only one
        return f"{self.pipeline}-{self.index}" if self.pipeline in SHARDED else self.pipeline


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
        "agents": 0 if config.agents is None else config.agents.processes,
        "gateway": 0 if not config.has_gateway else 1 if config.gateway is None else config.gateway.processes,
        "rollout": config.rollout.processes,
        "experience": config.experience.shards,
        "trainer": config.trainer.ranks,
    }
    for pipeline in ALL_PIPELINES:
        if config.emulated and pipeline in WITH_MODEL:
            continue
        roles += [Role(pipeline, index) for index in range(counts.get(pipeline, 1))]
    return roles


def pipelines_of(config: Config) -> tuple[str, ...]:
    """The pipelines of a run, on all machines, in drain order."""
    return ALL_PIPELINES if config.has_gateway else PIPELINES


def run_role(config: Config, role: Role, runner: Runner = "embedded", beam_options: Sequence[str] = ()) -> None:
    """Run `role` until it is stopped or fails. Raises ConfigError, and the exception that made the pipeline fail."""
    _run(config, role.name, partial(build_role, config=config, role=role), runner, beam_options)


def run_process(config: Config, process: RoleProcess) -> None:
    """Run the roles of `process` on the embedded runner, as `run_role`."""
    if len(process.roles) == 1:
        run_role(config, process.roles[0])
        return
    from pipelines.branches import build_branches

    builds = {role.name: partial(build_role, config=config, role=role) for role in process.roles}
    _run(config, process.name, partial(build_branches, builds=builds), "embedded", ())


def import_pipeline(role: Role) -> ModuleType:
    """The module of the pipeline of `role`, which imports Beam and, for some, torch."""
    return importlib.import_module(f"pipelines.{role.pipeline}")


def build_role(begin: Pipeline | PCollection, config: Config, role: Role) -> None:
    """Add the graph of `role` to a pipeline, or to polls that it has read. Raises ConfigError."""
    from pipelines.config import ConfigError
    from pipelines.shards import with_relay_token

    config = replace(config, kafka=config.kafka.for_role(role.pipeline))
    build: Callable[..., None] = import_pipeline(role).build
    index_argument = {SHARDED[role.pipeline]: role.index} if role.pipeline in SHARDED else {}
    try:
        if role.pipeline in WITH_STORE:
            config = with_relay_token(config, config.run_folder, create=True)
        build(begin, config=config, **index_argument)
    except (ValueError, OSError) as error:  # nothing runs yet, so the configuration is the cause
        raise ConfigError(f"{role.name} cannot be built: {error}") from error


def _run(
    config: Config, name: str, build: Callable[[Pipeline], None], runner: Runner, beam_options: Sequence[str]
) -> None:
    from infra.runners.liveness import LIVENESS, alive_file
    from infra.runners.run import run_pipeline
    from operators.io.shards import close_shards

    logging.getLogger(__name__).info("starting %s", name)
    with LIVENESS.reporting(alive_file(liveness_file(config.run_folder, name))):
        run_pipeline(build, runner, beam_options, close_shards)


def liveness_file(run_folder: Path, name: str) -> Path:
    """The file in which the process `name` reports its liveness and progress, see `infra.runners.liveness`."""
    return run_folder / "alive" / f"{name}.json"


def configure_logging() -> None:
    """Log to standard error, one line per event."""
    to_stderr = logging.StreamHandler()
    to_stderr.setFormatter(EscapingFormatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[to_stderr], force=True)
    # kafka-python logs each reconnect of each client as an error; Laminar logs the failures that matter.
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    logging.getLogger("apache_beam").setLevel(logging.ERROR)
