"""The paths in a configuration, made absolute: roles and `laminar submit` read them from other working directories."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from operators.experience.components import Component
from operators.prompts.config import TaskConfig
from operators.rollout.environments.config import EnvironmentSpec
from operators.score.config import RewardSpec, Rubric
from pipelines.config import Config
from pipelines.roles import ADMIN

_SCRIPT = ".py"
AnyTask = TypeVar("AnyTask", bound=TaskConfig)
AnyRubric = TypeVar("AnyRubric", bound=Rubric)
AnySpec = TypeVar("AnySpec", RewardSpec, EnvironmentSpec, Component)


def with_absolute_paths(config: Config) -> Config:
    """`config` with absolute paths."""
    emulation = config.rollout.emulation
    lengths = replace(emulation.lengths, file=_absolute(emulation.lengths.file))
    return replace(
        config,
        run=replace(config.run, folder=config.run.folder.expanduser().absolute()),
        kafka=replace(config.kafka, client_properties=_absolute(config.kafka.client_properties)),
        model=replace(config.model, path=_absolute(config.model.path)),
        prompts=replace(_absolute_task(config.prompts), tasks=tuple(map(_absolute_task, config.prompts.tasks))),
        rollout=replace(
            config.rollout,
            emulation=replace(emulation, lengths=lengths),
            environments=tuple(map(_absolute_name, config.rollout.environments)),
        ),
        trainer=replace(config.trainer, checkpoint_folder=_absolute_or_url(config.trainer.checkpoint_folder)),
        relay=replace(
            config.relay,
            token_file=_absolute(config.relay.token_file),
            certificate_file=_absolute(config.relay.certificate_file),
            authority_file=_absolute(config.relay.authority_file),
        ),
        experience=replace(
            config.experience,
            sampler=_absolute_name(config.experience.sampler),
            writers=tuple(map(_absolute_name, config.experience.writers)),
            evictions=tuple(map(_absolute_name, config.experience.evictions)),
        ),
        gateway=config.gateway
        and replace(
            config.gateway,
            secret_file=_absolute(config.gateway.secret_file),
            certificate_file=_absolute(config.gateway.certificate_file),
            key_file=_absolute(config.gateway.key_file),
        ),
        agents=config.agents and replace(config.agents, function=_absolute_target(config.agents.function)),
        score=replace(_absolute_rubric(config.score), tasks=tuple(map(_absolute_rubric, config.score.tasks))),
    )


def files_read(config: Config) -> Iterator[tuple[str, Path]]:
    """The files that a run reads, except the model, each with its configuration key."""
    named = (
        ("kafka.client_properties", config.kafka.for_role(ADMIN).client_properties),
        *(("prompts.path", task.path) for task in config.prompts.mixture),
        *(("prompts.heldout_path", task.heldout_path) for task in config.prompts.mixture),
        ("rollout.emulation.lengths.file", config.rollout.emulation.lengths.file),
        ("relay.token_file", config.relay.token_file),
        ("relay.certificate_file", config.relay.certificate_file),
        ("relay.authority_file", config.relay.authority_file),
        *(("gateway.secret_file", gateway.secret_file) for gateway in [config.gateway] if gateway),
        *(("gateway.certificate_file", gateway.certificate_file) for gateway in [config.gateway] if gateway),
        *(("gateway.key_file", gateway.key_file) for gateway in [config.gateway] if gateway),
        *(("agents.function", _script_of(agents.function)) for agents in [config.agents] if agents),
        ("experience.sampler", _script(config.experience.sampler)),
        *(("experience.writers", _script(each)) for each in config.experience.writers),
        *(("experience.evictions", _script(each)) for each in config.experience.evictions),
        *(("rollout.environments", _script(spec)) for spec in config.rollout.environments),
        *(("score.rewards", _script(spec)) for rubric in config.score.rubrics for spec in rubric.rewards),
    )
    return ((key, Path(path)) for key, path in named if path)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


def _absolute_or_url(text: str) -> str:
    """`text`, a folder or a storage URL."""
    return text if "://" in text else _absolute(text)


def _absolute_task(task: AnyTask) -> AnyTask:
    return replace(task, path=_absolute(task.path), heldout_path=_absolute(task.heldout_path))


def _absolute_rubric(rubric: AnyRubric) -> AnyRubric:
    return replace(rubric, rewards=tuple(map(_absolute_name, rubric.rewards)))


def _script(spec: RewardSpec | EnvironmentSpec | Component) -> str:
    """The file of a reward, an environment or a component of the buffer; "" for a module name or a built-in."""
    return _script_of(spec.name)


def _script_of(target: str) -> str:
    module = target.rpartition(":")[0]
    return module if module.endswith(_SCRIPT) else ""


def _absolute_target(target: str) -> str:
    script = _script_of(target)
    return f"{_absolute(script)}:{target.rpartition(':')[2]}" if script else target


def _absolute_name(spec: AnySpec) -> AnySpec:
    return replace(spec, name=_absolute_target(spec.name)) if _script(spec) else spec
