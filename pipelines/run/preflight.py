"""Checks of a configuration before anything is started."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from infra.models.demo_config import PHRASES
from pipelines.config import Config, ConfigError
from pipelines.distribution import install_extra
from pipelines.run.host_checks import host_problems
from pipelines.run.learnability import unlearnable
from pipelines.run.paths import files_read

MODEL_PARTS = {
    "config": ("config.json",),
    "weights": ("model.safetensors", "model.safetensors.index.json"),
    "tokenizer": ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"),
}
"""Files that a model folder must have, one of each kind; checked before torch is imported."""


def missing_requirements(config: Config, *, warm_start: bool = True, new: bool = True) -> Iterator[str]:
    """All reasons why `config` cannot run. With `warm_start`, a missing model may be created; see `host_problems`."""
    if config.emulated:
        yield from _emulation(config)
    elif config.model.path or not warm_start:
        yield from _model(config)
    elif config.warm_start is None:
        yield "model.path is not set: name a Hugging Face folder, or give a [warm_start] section"
    warm = config.warm_start if warm_start and not config.model.path else None
    if warm and all(task.task != warm.model.task for task in config.prompts.mixture):
        yield f"warm_start.model.task is {warm.model.task!r}, but no task of [prompts] is"
    if warm and warm.model.task not in PHRASES:
        yield (
            f"warm_start: there are no worked answers for task {warm.model.task!r}, only for "
            f"{', '.join(sorted(PHRASES))}; set model.path to a model of your own, which needs no warm start"
        )
    missing = {key: path for key, path in files_read(config) if not path.exists()}
    yield from (f"{key}: {path} does not exist" for key, path in missing.items())
    yield from _secrets(config, missing)
    if config.rollout.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        yield f"rollout.engine is 'vllm', which is not installed: {install_extra('vllm')}"
    if config.agents is not None and config.agents.function and importlib.util.find_spec("openai") is None:
        yield f"agents.function needs the package openai, which is not installed: {install_extra('agents')}"
    if config.agents is not None and config.agents.command and shutil.which(config.agents.command[0]) is None:
        yield f"agents.command: there is no program {config.agents.command[0]!r}"
    if config.rollout.total_replicas > config.placement.max_replicas:
        yield (
            f"rollout.processes × rollout.replicas = {config.rollout.total_replicas} replicas, "
            f"but placement.max_replicas is {config.placement.max_replicas}"
        )
    yield from host_problems(config, new=new)
    yield from unlearnable(config)
    unit = max(task.samples_per_prompt for task in config.prompts.mixture)
    if unit > config.admitted:
        yield (
            f"prompts.samples_per_prompt = {unit} is more than the limit of outstanding trajectories, "
            f"{config.admitted} (see placement.admitted_batches)"
        )


def _secrets(config: Config, missing: Collection[str]) -> Iterator[str]:
    """Kafka login and relay token, as far as they can be checked without a connection; not those of missing files."""
    try:
        given = config.kafka.bootstrap_servers or config.kafka.client_properties
        if given and "kafka.client_properties" not in missing:
            config.kafka.client().admin()
    except (ValueError, OSError) as error:
        yield f"kafka: {error}"
    try:
        if "relay.token_file" not in missing:
            config.relay.token()
    except ValueError as error:
        yield f"relay: {error}"


def _emulation(config: Config) -> Iterator[str]:
    if any(task.source != "synthetic" for task in config.prompts.mixture):
        yield "rollout.engine is 'emulated', which has no tokenizer: set prompts.source = 'synthetic'"
    if config.model.path or config.warm_start is not None:
        yield "rollout.engine is 'emulated', which has no model: remove model.path and [warm_start]"


def _model(config: Config) -> Iterator[str]:
    try:
        folder: Path = config.model_folder()
    except ConfigError as error:
        yield str(error)
        return
    for what, names in MODEL_PARTS.items():
        if not any((folder / name).is_file() for name in names):
            yield f"model.path: {folder} has no {what} (none of {', '.join(names)})"
