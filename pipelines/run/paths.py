"""The paths in a configuration: roles, and `laminar submit` later, read them too, from other folders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from operators.score.config import RewardSpec
from pipelines.config import Config

_SCRIPT = ".py"


def with_whole_paths(config: Config) -> Config:
    """`config` with paths that mean the same from any folder."""
    emulation = config.rollout.emulation
    lengths = replace(emulation.lengths, file=_whole(emulation.lengths.file))
    return replace(
        config,
        run=replace(config.run, folder=config.run.folder.expanduser().absolute()),
        kafka=replace(config.kafka, client_properties=_whole(config.kafka.client_properties)),
        model=replace(config.model, path=_whole(config.model.path)),
        prompts=replace(
            config.prompts, path=_whole(config.prompts.path), heldout_path=_whole(config.prompts.heldout_path)
        ),
        rollout=replace(config.rollout, emulation=replace(emulation, lengths=lengths)),
        relay=replace(config.relay, token_file=_whole(config.relay.token_file)),
        score=replace(config.score, rewards=tuple(map(_whole_reward, config.score.rewards))),
    )


def files_read(config: Config) -> Iterator[tuple[str, Path]]:
    """What must be there before a run can begin, but for the model: each with the key that names it."""
    named = (
        ("kafka.client_properties", config.kafka.client_properties),
        ("prompts.path", config.prompts.path),
        ("prompts.heldout_path", config.prompts.heldout_path),
        ("rollout.emulation.lengths.file", config.rollout.emulation.lengths.file),
        ("relay.token_file", config.relay.token_file),
        *(("score.rewards", _script(spec)) for spec in config.score.rewards),
    )
    return ((key, Path(path)) for key, path in named if path)


def _whole(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


def _script(spec: RewardSpec) -> str:
    """The file that a reward's function is in; "" for what is imported by its module's name, or built in."""
    module = spec.name.rpartition(":")[0]
    return module if module.endswith(_SCRIPT) else ""


def _whole_reward(spec: RewardSpec) -> RewardSpec:
    script = _script(spec)
    return replace(spec, name=f"{_whole(script)}:{spec.name.rpartition(':')[2]}") if script else spec
