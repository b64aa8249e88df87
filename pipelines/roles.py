"""The roles of a run: each an own pipeline in an own process."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from infra.escaping import EscapingFormatter
from pipelines.config import Config, ConfigError

if TYPE_CHECKING:
    from apache_beam import Pipeline

    from infra.runners.options import Runner

PIPELINES = ("prompts", "placement", "rollout", "score", "experience", "trainer", "evaluation", "relay")
"""Every pipeline, in the order in which they drain."""

CANNOT_RUN = 2
"""Exit code of a role that its configuration keeps from running: starting it again would not help."""

WITH_MODEL = {"evaluation", "relay"}
"""Pipelines that an emulated run does without: it has no model to ask, and no weights to keep."""

EMULATED = "emulated:"
"""Stands for the model's folder where there is none: what an emulated run does without need not be imported."""

SHARDED = {"rollout": "process", "relay": "index", "experience": "shard", "trainer": "rank"}
"""Pipelines of which several may run, and what each calls the index that tells them apart."""


@dataclass(frozen=True)
class Role:
    """One process of a run."""

    pipeline: str
    index: int = 0

    @property
    def name(self) -> str:
        if self.pipeline in ("experience", "trainer") and not self.index:
            return self.pipeline  # most runs have no other
        return f"{self.pipeline}-{self.index}" if self.pipeline in SHARDED else self.pipeline


def roles_of(config: Config) -> list[Role]:
    """The processes of a run on one machine, in the order in which they drain."""
    roles = []
    counts = {
        "rollout": config.rollout.processes,
        "experience": config.experience.shards,
        "trainer": config.trainer.ranks,
    }
    for pipeline in PIPELINES:
        if config.emulated and pipeline in WITH_MODEL:
            continue
        roles += [Role(pipeline, index) for index in range(counts.get(pipeline, 1))]
    return roles


def run_role(config: Config, role: Role, runner: Runner = "embedded", beam_options: Sequence[str] = ()) -> None:
    """Run `role` until it is stopped or fails. Raises ConfigError, and what made the pipeline fail."""
    from infra.runners.liveness import LIVENESS, alive_file
    from infra.runners.run import run_pipeline
    from operators.io.shards import close_shards

    config = replace(config, kafka=config.kafka.for_role(role.pipeline))
    build: Callable[..., None] = importlib.import_module(f"pipelines.{role.pipeline}").build
    where = {SHARDED[role.pipeline]: role.index} if role.pipeline in SHARDED else {}

    def build_role(pipeline: Pipeline) -> None:
        try:
            build(pipeline, config=config, **where)
        except (ValueError, OSError) as error:  # nothing runs yet: it can only be what it was told to do
            raise ConfigError(f"{role.name} cannot be built: {error}") from error

    logging.getLogger(__name__).info("%s starts", role.name)
    with LIVENESS.reporting(alive_file(liveness_file(config.run_folder, role.name))):
        run_pipeline(build_role, runner, beam_options, close_shards)


def liveness_file(run_folder: Path, name: str) -> Path:
    """Where the process of the role called `name` reports its liveness and progress, see `infra.runners.liveness`."""
    return run_folder / "alive" / f"{name}.json"


def configure_logging() -> None:
    """Logs of a role: one line an event, to standard error."""
    to_stderr = logging.StreamHandler()
    to_stderr.setFormatter(EscapingFormatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[to_stderr], force=True)
    # kafka-python reports every reconnect of every client as an error; what matters reaches our own logs.
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    logging.getLogger("apache_beam").setLevel(logging.ERROR)
