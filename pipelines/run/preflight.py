"""What can be known to fail before anything is started: what a configuration lacks, or contradicts itself in."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from infra.gpus import visible_gpus
from pipelines.config import Config, ConfigError
from pipelines.run.paths import files_read

MODEL_PARTS = {
    "config": ("config.json",),
    "weights": ("model.safetensors", "model.safetensors.index.json"),
    "tokenizer": ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"),
}
"""What a model folder must hold: one file of each kind. Asked before torch is imported."""


def missing_requirements(config: Config, *, warm_start: bool = True) -> Iterator[str]:
    """Every such reason. With `warm_start` a model may still be made."""
    if config.emulated:
        yield from _of_emulation(config)
    elif config.model.path or not warm_start:
        yield from _of_model(config)
    elif config.warm_start is None:
        yield "model.path is not set: name a Hugging Face folder, or give a [warm_start] section"
    learning = config.warm_start if warm_start and not config.model.path else None
    if learning and all(task.task != learning.model.task for task in config.prompts.mixture):
        yield f"warm_start.model.task is {learning.model.task!r}, but no prompts are of that task"
    for key, path in files_read(config):
        if not path.exists():
            yield f"{key}: there is no {path}"
    yield from _of_secrets(config)
    if config.rollout.engine == "vllm":
        yield from _of_vllm(config)
    if config.rollout.total_replicas > config.placement.max_replicas:
        yield (
            f"rollout.processes × rollout.replicas = {config.rollout.total_replicas} replicas, "
            f"but placement.max_replicas is {config.placement.max_replicas}"
        )
    unit = max(task.samples_per_prompt for task in config.prompts.mixture)
    if unit > config.admitted:
        yield f"prompts.samples_per_prompt = {unit} is more than may be outstanding ({config.admitted})"


def _of_secrets(config: Config) -> Iterator[str]:
    """Login and token, as far as they can be looked at without a broker or another relay."""
    try:
        if config.kafka.bootstrap_servers or config.kafka.client_properties:
            config.kafka.client().admin()
    except (ValueError, OSError) as error:
        yield f"kafka: {error}"
    try:
        config.relay.token()
    except ValueError as error:
        yield f"relay: {error}"


def _of_vllm(config: Config) -> Iterator[str]:
    if importlib.util.find_spec("vllm") is None:
        yield "rollout.engine is vllm, which is not installed: pip install 'laminar-rl[vllm]'"
    try:
        config.rollout.gpus_of(0, visible_gpus())
    except ValueError as error:
        yield str(error)


def _of_emulation(config: Config) -> Iterator[str]:
    if any(task.source != "synthetic" for task in config.prompts.mixture):
        yield "rollout.engine is emulated, which has no tokenizer: set prompts.source = 'synthetic'"
    if config.model.path or config.warm_start is not None:
        yield "rollout.engine is emulated, which has no model: leave out model.path and [warm_start]"


def _of_model(config: Config) -> Iterator[str]:
    try:
        folder: Path = config.model_folder()
    except ConfigError as error:
        yield str(error)
        return
    for what, names in MODEL_PARTS.items():
        if not any((folder / name).is_file() for name in names):
            yield f"model.path: {folder} has no {what} (none of {', '.join(names)})"
