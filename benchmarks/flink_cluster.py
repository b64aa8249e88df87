"""A Flink cluster of processes: a job manager, task managers, and beside each of these a pool of Beam workers.

It consists of the jars of Beam's job server. `command` puts a process on its host, for instance in a network namespace;
without one all run on loopback, where the task managers share a pool.
"""

from __future__ import annotations

import http.client
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil

from infra.http_client import open_url
from infra.kafka.broker import HOST, free_port, java_command
from infra.processes import is_running, spawn
from infra.runners.flink import java_options, server_jars
from infra.runners.loopback import loopback_command

MANAGER = "manager"
"""The name of the job manager, and of its host."""
POOL_COMMAND = (sys.executable, "-m", "infra.runners.worker_pool")
START_S = 120.0
_ENTRY = "org.apache.flink.runtime.entrypoint.StandaloneSessionClusterEntrypoint"
_TASKS = "org.apache.flink.runtime.taskexecutor.TaskManagerRunner"
_HEAP_MB = {MANAGER: 512}
_TASK_HEAP_MB = 768
_MAX_REPLY = 1 << 20


@dataclass(frozen=True)
class Place:
    """Where the processes of the cluster run: addresses by name, and the command line of a process there."""

    addresses: Mapping[str, str]
    command: Callable[[str, list[str]], list[str]]
    ask: Callable[[Callable[[], Any]], Any] = lambda work: work()
    """Calls a function where the job manager can be reached."""


def loopback(names: Sequence[str]) -> Place:
    """All of `names` on this machine's loopback interface."""
    return Place(dict.fromkeys((MANAGER, *names), HOST), lambda _, command: command)


@dataclass
class FlinkCluster:
    """A job manager and the task managers `tasks` with `slots` each; their logs are in `folder`.

    All managers have the settings `configuration`, too; `pool_command` starts a worker pool, followed by its port.
    """

    folder: Path
    tasks: tuple[str, ...]
    place: Place
    slots: int = 1
    configuration: Mapping[str, object] = field(default_factory=dict)
    pool_command: Sequence[str] = POOL_COMMAND
    rest_port: int = field(default_factory=free_port)
    rpc_port: int = field(default_factory=free_port)
    pool_port: int = field(default_factory=free_port)
    processes: dict[str, psutil.Process] = field(default_factory=dict)
    """By name: the managers, and `pool NAME` for the pools beside the task managers."""

    @property
    def master(self) -> str:
        """The address of the REST interface."""
        return f"{self.place.addresses[MANAGER]}:{self.rest_port}"

    @property
    def options(self) -> list[str]:
        """The options of a job on this cluster, with one subtask a slot."""
        return [
            f"--flink_master={self.master}",
            "--environment_type=EXTERNAL",
            f"--environment_config=localhost:{self.pool_port}",
            f"--parallelism={self.slots * len(self.tasks)}",
        ]

    @property
    def pools(self) -> tuple[str, ...]:
        """The names of the worker pools: one on each host of task managers."""
        hosts = {self.place.addresses[task]: task for task in reversed(self.tasks)}
        return tuple(f"pool {task}" for task in hosts.values())

    def start(self) -> None:
        """Start all processes, and wait until every task manager has registered."""
        for name in (MANAGER, *self.tasks, *self.pools):
            self.start_process(name)
        self.wait()

    def log(self, name: str) -> Path:
        """The log of a process."""
        return self.folder / f"{name.replace(' ', '-')}.log"

    def start_process(self, name: str) -> None:
        """Start a manager or a pool, again after `kill`."""
        host = name.removeprefix("pool ")
        folder = self.folder / name.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        if name == host:
            settings = {**self._settings(name), **self.configuration}
            (folder / "config.yaml").write_text("".join(f"{key}: {value}\n" for key, value in settings.items()))
            arguments = ["--configDir", str(folder), *(["--executionMode", "cluster"] if name == MANAGER else [])]
            entry = _ENTRY if name == MANAGER else _TASKS
            java, *rest = java_command(_HEAP_MB.get(name, _TASK_HEAP_MB), server_jars(), entry, *arguments)
            command = [java, *java_options(folder), *rest]
            if self.place.addresses[name] == HOST:
                command = loopback_command(command)
        else:
            command = [*self.pool_command, str(self.pool_port)]
        placed = self.place.command(host, ["/usr/bin/env", f"TMPDIR={folder}", *command])
        self.processes[name] = spawn(placed, self.log(name), die_with_parent=True)

    def kill(self, name: str) -> None:
        """Kill a process and all that it has started."""
        process = self.processes.pop(name)
        for each in [process, *process.children(recursive=True)]:
            try:
                each.kill()
                each.wait(30)
            except psutil.NoSuchProcess:
                continue

    def stop(self) -> None:
        """Kill all processes."""
        for name in list(self.processes):
            self.kill(name)

    def wait(self, seconds: float = START_S) -> None:
        """Return once all task managers have registered. Raises AssertionError."""
        deadline = time.monotonic() + seconds
        while len(self.rest("/taskmanagers").get("taskmanagers", ())) < len(self.tasks):
            for name, process in self.processes.items():
                assert is_running(process), f"{name} has ended, see {self.folder}"
            assert time.monotonic() < deadline, f"not all of {self.tasks} have registered, see {self.folder}"
            time.sleep(0.2)

    def rest(self, path: str) -> Any:
        """The reply of the job manager's REST interface; empty while there is none."""

        def ask() -> Any:
            try:
                with open_url(f"http://{self.master}{path}", 10.0) as reply:
                    return json.loads(reply.read(_MAX_REPLY))
            except (OSError, ValueError, http.client.HTTPException):
                return {}

        return self.place.ask(ask)

    def jobs(self, state: str = "RUNNING") -> list[str]:
        """The ids of the jobs in `state`."""
        return [job["id"] for job in self.rest("/jobs").get("jobs", ()) if job["status"] == state]

    def metrics(self, vertex: str, ending: str) -> list[float]:
        """The metric whose name has this `ending`, of each subtask of the only job's vertices with `vertex` in their
        names, as far as it is known."""
        (job,), found = self.jobs(), list[float]()
        for each in self.rest(f"/jobs/{job}").get("vertices", ()):
            for subtask in range(each["parallelism"] if vertex in each["name"] else 0):
                path = f"/jobs/{job}/vertices/{each['id']}/subtasks/{subtask}/metrics"
                names = [known["id"] for known in self.rest(path) if known["id"].endswith(ending)]
                replies = [self.rest(f"{path}?get={quote(name, safe='')}") for name in names]
                found += [float(known["value"]) for reply in replies for known in reply]
        return found

    def workers(self) -> list[psutil.Process]:
        """The Beam workers of all pools."""
        found = [each for pool in self.pools for each in _children(self.processes.get(pool))]
        return [each for each in found if "infra.runners.worker " in _command(each)]

    def _settings(self, name: str) -> dict[str, object]:
        address = self.place.addresses[name]
        shared = {
            "jobmanager.rpc.address": self.place.addresses[MANAGER],
            "jobmanager.rpc.port": self.rpc_port,
            "rest.address": self.place.addresses[MANAGER],
            "rest.port": self.rest_port,
            "heartbeat.interval": 1000,
            "heartbeat.timeout": 6000,
            # Beam's classes are on every class path: a job brings no second copy of them.
            "classloader.resolve-order": "parent-first",
            "restart-strategy.type": "fixed-delay",
        }
        if name == MANAGER:
            # Its parts call each other by `localhost`, which is in the host's namespace, too.
            bound = address if address == HOST else "0.0.0.0"
            return {**shared, "jobmanager.bind-host": bound, "rest.bind-address": address}
        sizes = {"task.heap": 512, "task.off-heap": 0, "framework.heap": 128, "framework.off-heap": 128, "managed": 32}
        ranges = {"network": 64, "jvm-overhead": 192}
        return {
            **shared,
            "taskmanager.host": address,
            "taskmanager.bind-host": address,
            "taskmanager.numberOfTaskSlots": self.slots,
            "taskmanager.cpu.cores": 1.0,
            "taskmanager.memory.jvm-metaspace.size": "256mb",
            **{f"taskmanager.memory.{part}.{end}": f"{mb}mb" for part, mb in ranges.items() for end in ("min", "max")},
            **{f"taskmanager.memory.{part}.size": f"{megabytes}mb" for part, megabytes in sizes.items()},
        }


def _children(process: psutil.Process | None) -> list[psutil.Process]:
    try:
        return process.children(recursive=True) if process is not None else []
    except psutil.NoSuchProcess:
        return []


def _command(process: psutil.Process) -> str:
    try:
        return shlex.join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """The CPU time of `processes` so far."""
    total = 0.0
    for each in processes:
        try:
            times = each.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total
