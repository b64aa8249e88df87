"""The keys of a configuration that name files, and where relative paths in a configuration file begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WRITTEN = ("run.folder", "trainer.checkpoint_folder", "relay.disk_folder", "relay.object_store")
"""The keys of folders that a run writes; they are relative to the working directory."""
_TASKS = ("", "tasks.")
READ = {
    "model.path",
    "kafka.client_properties",
    *(f"prompts.{tasks}{name}" for tasks in _TASKS for name in ("path", "heldout_path")),
    "rollout.emulation.lengths.file",
    *(f"relay.{name}" for name in ("token_file", "certificate_file", "authority_file")),
    *(f"gateway.{name}" for name in ("secret_file", "certificate_file", "key_file")),
    "autoscaling.price_file",
}
"""The keys of files and folders that a run reads; in a configuration file they are relative to its folder."""
TARGETS = {
    "rollout.environments.name",
    *(f"prompts.{tasks}environment" for tasks in _TASKS),
    "agents.function",
    "trainer.learner.name",
    "autoscaling.policy",
    *(f"experience.{kind}.name" for kind in ("sampler", "writers", "evictions")),
    *(f"score.{tasks}rewards.name" for tasks in _TASKS),
}
"""The keys that may name `path/to/file.py:function`; others of their values are modules or built in."""


def script_of(target: str) -> str:
    """The file of a reward, an environment, a learner or the like; "" for a module name or a built-in."""
    module = target.rpartition(":")[0]
    return module if module.endswith(".py") else ""


def beside(folder: Path, value: Any, key: str = "") -> Any:
    """`value`, which stands at `key` of a configuration file in `folder`, with absolute paths of what a run reads."""
    if isinstance(value, dict):
        return {name: beside(folder, each, f"{key}.{name}".lstrip(".")) for name, each in value.items()}
    if isinstance(value, list):
        return [beside(folder, each, key) for each in value]
    if not isinstance(value, str) or not value:
        return value
    if key in TARGETS:
        script = script_of(value)
        return f"{_absolute(folder, script)}:{value.rpartition(':')[2]}" if script else value
    return _absolute(folder, value) if key in READ and "://" not in value else value


def _absolute(folder: Path, path: str) -> str:
    return str(folder.absolute() / Path(path).expanduser())
