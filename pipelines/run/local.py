"""`laminar run` from name to closing lines: what goes on around the supervisor."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from infra.files import write_atomically
from pipelines.cli.output import Report
from pipelines.config import Config, ConfigError
from pipelines.report.closing import closing_lines
from pipelines.report.html import render_report
from pipelines.report.summary import summarise
from pipelines.run.paths import files_read, with_whole_paths
from pipelines.run.state import RunStateFile, point_latest
from pipelines.run.stop_requests import Interrupted, StopRequests
from pipelines.run.supervisor import Supervisor
from pipelines.view.live import LiveView
from schemas.topics import run_prefix

MODEL_PARTS = {
    "config": ("config.json",),
    "weights": ("model.safetensors", "model.safetensors.index.json"),
    "tokenizer": ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"),
}
"""What a model folder must hold: one file of each kind. Asked before torch is imported."""


def run_locally(config: Config, file: Path, stops: StopRequests, *, as_json: bool = False) -> Report:
    """Run `config`, read from `file`, on this machine, unless `stops` hears that it is to stop.

    The report's exit code is 0 if the goal was reached and the books balance. Once they are made, a request changes
    nothing: what belongs to a run that has ended is always written.

    Raises ConfigError before anything is started, and what keeps the run from going on.
    """
    config = with_whole_paths(named(config))
    check(config)
    folder = config.run_folder
    (folder / "logs").mkdir(parents=True)
    point_latest(folder)
    state = RunStateFile(folder, config.run.name, config.trainer.optimizer_steps)
    state.write()
    try:
        with LiveView(Console(stderr=as_json), config.run.name, config.trainer.optimizer_steps) as view:
            balance = Supervisor(config, view, state, stops).run()
    except Interrupted as stop:
        state.end(f"{stop} before its goal", "stopped")
        answer = {"run": config.run.name, "error": state.error}
        text = f"{state.error}; what there is lies in {_as_seen_from_here(folder)}"
        return Report(answer, lambda: text, as_json, stop.exit_code)
    except BaseException as error:
        state.end(f"{type(error).__name__}: {error}")
        raise
    state.end()
    audited = {**balance.numbers(), "balanced": balance.balanced}
    write_atomically(folder / "audit.json", json.dumps(balance.to_json(), indent=1))
    summary = summarise(folder, audited, state.phases)
    write_atomically(folder / "summary.json", json.dumps(summary, indent=1))
    write_atomically(folder / "report.html", render_report(folder))
    code = 0 if balance.balanced else 1
    return Report(summary, lambda: closing_lines(_as_seen_from_here(folder), summary, file), as_json, code)


def named(config: Config) -> Config:
    """`config` with a run name: the task and the time, unless it has one."""
    if config.run.name:
        return config
    tasks = "-".join(task.name or task.task or task.source for task in config.prompts.mixture)
    stem = "".join(letter if letter.isalnum() else "-" for letter in tasks)[:40]
    return replace(config, run=replace(config.run, name=f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"))


def _as_seen_from_here(folder: Path) -> Path:
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def check(config: Config) -> None:
    """Raise ConfigError for what can be known to fail before anything is started."""
    if (config.run_folder / "state.json").exists():
        raise ConfigError(f"there is a run {config.run.name!r} in {config.run.folder} already: choose another run.name")
    run_prefix(config.run.name)
    if config.emulated:
        _check_emulation(config)
    elif config.model.path:
        _check_model(config.model_folder())
    elif config.warm_start is None:
        raise ConfigError("model.path is not set: name a Hugging Face folder, or give a [warm_start] section")
    learning = config.warm_start
    if learning and not config.model.path and all(task.task != learning.model.task for task in config.prompts.mixture):
        raise ConfigError(f"warm_start.model.task is {learning.model.task!r}, but no prompts are of that task")
    for key, path in files_read(config):
        if not path.exists():
            raise ConfigError(f"{key}: there is no {path}")
    _check_secrets(config)
    if config.rollout.total_replicas > config.placement.max_replicas:
        raise ConfigError(
            f"rollout.processes × rollout.replicas = {config.rollout.total_replicas} replicas, "
            f"but placement.max_replicas is {config.placement.max_replicas}"
        )
    unit = max(task.samples_per_prompt for task in config.prompts.mixture)
    if unit > config.admitted:
        raise ConfigError(f"prompts.samples_per_prompt = {unit} is more than may be outstanding ({config.admitted})")


def _check_secrets(config: Config) -> None:
    """Login and token, as far as they can be looked at without a broker or another relay."""
    try:
        if config.kafka.bootstrap_servers or config.kafka.client_properties:
            config.kafka.client().admin()
    except (ValueError, OSError) as error:
        raise ConfigError(f"kafka: {error}") from error
    try:
        config.relay.token()
    except ValueError as error:
        raise ConfigError(f"relay: {error}") from error


def _check_emulation(config: Config) -> None:
    if any(task.source != "synthetic" for task in config.prompts.mixture):
        raise ConfigError("rollout.engine is emulated, which has no tokenizer: set prompts.source = 'synthetic'")
    if config.model.path or config.warm_start is not None:
        raise ConfigError("rollout.engine is emulated, which has no model: leave out model.path and [warm_start]")


def _check_model(folder: Path) -> None:
    for what, names in MODEL_PARTS.items():
        if not any((folder / name).is_file() for name in names):
            raise ConfigError(f"model.path: {folder} has no {what} (none of {', '.join(names)})")
