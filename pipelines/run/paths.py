"""The paths in a configuration: roles, and `laminar submit` later, read them too, from other folders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from operators.prompts.config import TaskConfig
from operators.score.config import RewardSpec, Rubric
from pipelines.config import ADMIN, Config

_SCRIPT = ".py"
AnyTask = TypeVar("AnyTask", bound=TaskConfig)
AnyRubric = TypeVar("AnyRubric", bound=Rubric)


def with_absolute_paths(config: Config) -> Config:
    """`config` with paths that mean the same from any folder."""
    emulation = config.rollout.emulation
    lengths = replace(emulation.lengths, file=_whole(emulation.lengths.file))
    return replace(
        config,
        run=replace(config.run, folder=config.run.folder.expanduser().absolute()),
        kafka=replace(config.kafka, client_properties=_whole(config.kafka.client_properties)),
        model=replace(config.model, path=_whole(config.model.path)),
        prompts=replace(_whole_task(config.prompts), tasks=tuple(map(_whole_task, config.prompts.tasks))),
        rollout=replace(config.rollout, emulation=replace(emulation, lengths=lengths)),
        trainer=replace(config.trainer, checkpoint_folder=_whole_place(config.trainer.checkpoint_folder)),
        relay=replace(
            config.relay,
            token_file=_whole(config.relay.token_file),
            certificate_file=_whole(config.relay.certificate_file),
            authority_file=_whole(config.relay.authority_file),
        ),
        score=replace(_whole_rubric(config.score), tasks=tuple(map(_whole_rubric, config.score.tasks))),
    )


def files_read(config: Config) -> Iterator[tuple[str, Path]]:
    """What must be there before a run can begin, but for the model: each with the key that names it."""
    named = (
        ("kafka.client_properties", config.kafka.for_role(ADMIN).client_properties),
        *(("prompts.path", task.path) for task in config.prompts.mixture),
        *(("prompts.heldout_path", task.heldout_path) for task in config.prompts.mixture),
        ("rollout.emulation.lengths.file", config.rollout.emulation.lengths.file),
        ("relay.token_file", config.relay.token_file),
        ("relay.certificate_file", config.relay.certificate_file),
        ("relay.authority_file", config.relay.authority_file),
        *(("score.rewards", _script(spec)) for rubric in config.score.rubrics for spec in rubric.rewards),
    )
    return ((key, Path(path)) for key, path in named if path)


def _whole(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


def _whole_place(text: str) -> str:
    """`text`, which names a folder anywhere."""
    return text if "://" in text else _whole(text)


def _whole_task(task: AnyTask) -> AnyTask:
    return replace(task, path=_whole(task.path), heldout_path=_whole(task.heldout_path))


def _whole_rubric(rubric: AnyRubric) -> AnyRubric:
    return replace(rubric, rewards=tuple(map(_whole_reward, rubric.rewards)))


def _script(spec: RewardSpec) -> str:
    """The file that a reward's function is in; "" for what is imported by its module's name, or built in."""
    module = spec.name.rpartition(":")[0]
    return module if module.endswith(_SCRIPT) else ""


def _whole_reward(spec: RewardSpec) -> RewardSpec:
    script = _script(spec)
    return replace(spec, name=f"{_whole(script)}:{spec.name.rpartition(':')[2]}") if script else spec
