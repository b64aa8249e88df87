"""The paths in a configuration, made absolute: roles and `laminar submit` read them from other working directories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from pipelines.config import Config
from pipelines.roles import ADMIN

_FILES_OF_TASKS = ("path", "heldout_path")
_NOT_READ = ("run.folder", "model.path", "trainer.checkpoint_folder")
_FILES = {
    *_NOT_READ,
    "kafka.client_properties",
    *(f"prompts.{tasks}{name}" for tasks in ("", "tasks.") for name in _FILES_OF_TASKS),
    "rollout.emulation.lengths.file",
    *(f"relay.{name}" for name in ("token_file", "certificate_file", "authority_file")),
    *(f"gateway.{name}" for name in ("secret_file", "certificate_file", "key_file")),
    "autoscaling.price_file",
}
"""The keys that name a file or a folder."""
_TARGETS = {
    "rollout.environments.name",
    "agents.function",
    "autoscaling.policy",
    *(f"experience.{kind}.name" for kind in ("sampler", "writers", "evictions")),
    *(f"score.{tasks}rewards.name" for tasks in ("", "tasks.")),
}
"""The keys that may name `path/to/file.py:function`; others of their values are modules or built in."""


def with_absolute_paths(config: Config) -> Config:
    """`config` with absolute paths."""

    def absolute(key: str, text: Any) -> Any:
        if key in _TARGETS:
            script = _script_of(text)
            return f"{_absolute(script)}:{text.rpartition(':')[2]}" if script else text
        return text if not text or "://" in str(text) else _absolute(text)

    mapped: Config = _mapped(config, "", absolute)
    return mapped


def files_read(config: Config) -> list[tuple[str, Path]]:
    """The files that a run reads, except the model, each with its configuration key."""
    found: list[tuple[str, Path]] = []

    def collect(key: str, text: Any) -> Any:
        inherited = config.prompts.tasks and key.startswith("prompts.") and not key.startswith("prompts.tasks.")
        if (file := _script_of(text) if key in _TARGETS else text) and key not in _NOT_READ and not inherited:
            found.append((key.replace(".tasks.", ".").removesuffix(".name"), Path(file)))
        return text

    _mapped(replace(config, kafka=config.kafka.for_role(ADMIN)), "", collect)
    return found


def _mapped(value: Any, key: str, change: Callable[[str, Any], Any]) -> Any:
    """`value`, which stands at `key`, with the results of `change` in the place of its paths."""
    if isinstance(value, tuple):
        return tuple(_mapped(item, key, change) for item in value)
    if is_dataclass(value):
        before = {field.name: getattr(value, field.name) for field in fields(value)}
        after = {name: _mapped(each, f"{key}.{name}".lstrip("."), change) for name, each in before.items()}
        return value if after == before else replace(value, **after)  # type: ignore[type-var]
    return change(key, value) if key in _FILES or key in _TARGETS else value


def _absolute(path: Any) -> Any:
    return type(path)(Path(path).expanduser().absolute())


def _script_of(target: str) -> str:
    """The file of a reward, an environment or a component of the buffer; "" for a module name or a built-in."""
    module = target.rpartition(":")[0]
    return module if module.endswith(".py") else ""
