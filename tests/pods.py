"""Runs the pods of Kubernetes manifests as processes: what a kubelet does, as far as containers can notice.

Each pod has a network namespace of its own. Each container has a PID and a mount namespace, with a root of its own that
holds the programs of this machine (in place of the image), the volumes that the manifest mounts, and nothing else; it
runs as the manifest's user, without capabilities, with the manifest's environment alone.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from faults.network import Host, Network

from infra.processes import is_running, spawn
from operators.autoscaler.kubernetes import ACCOUNT

ROOT = Path(__file__).parents[1]
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
ETC = ("passwd", "group", "nsswitch.conf", "ld.so.cache", "localtime", "ssl")
_VARIABLE = re.compile(r"\$\(([A-Z_]+)\)")


@dataclass
class Cluster:
    """Where pods run: their hosts by pod name, `nodes` with memory, the volumes' contents, and the cluster's names."""

    network: Network
    folder: Path
    config_maps: Mapping[str, Path]
    secrets: Mapping[str, Path]
    claims: Mapping[str, Path]
    nodes: Mapping[str, Path]
    """The folder in memory of each node."""
    folders: Mapping[str, Path] = field(default_factory=dict)
    """More folders of the image, by their paths in it."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the image."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Addresses by name, as the cluster's name service knows them."""
    api: str = ""
    """HOST:PORT of the API server, which every container finds in its environment; empty: none."""
    account: Path | None = None
    """What a pod with a service account mounts: its token, and the certificate of the API server's authority."""


class Container:
    """A container of a pod; a restart policy that restarts it is `start` again."""

    def __init__(self, cluster: Cluster, pod: Pod, spec: Mapping[str, Any]) -> None:
        self.spec, self._pod, self._cluster = spec, pod, cluster
        self.name = f"{pod.name}/{spec['name']}"
        self.log = cluster.folder / f"{pod.name}.log"
        self.starts = 0
        self._process: psutil.Process | None = None

    def start(self) -> psutil.Process:
        """Start the container's command, and return the process that ends with it."""
        self.starts += 1
        script = self._cluster.folder / f"{self._pod.name}.sh"
        script.write_text(self._script())
        isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--propagation", "private"]
        command = self._cluster.network.command(self._pod.host.name, *isolated, "sh", str(script))
        self._process = spawn(command, self.log, die_with_parent=True)
        return self._process

    @property
    def running(self) -> bool:
        return self._process is not None and is_running(self._process)

    def process(self) -> psutil.Process:
        """The container's first process, once it runs the manifest's command."""
        assert self._process is not None
        found = self._process
        while children := found.children():
            found = children[0]
            if "unshare" not in found.name():
                return found
        return found

    def send(self, number: int) -> None:
        """Send a signal as a kubelet does: to the first process of the container."""
        self.process().send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """The exit code of the command."""
        assert self._process is not None
        code = self._process.wait(timeout_s)
        assert code is not None
        return int(code)

    def evict(self, notice_s: float) -> int:
        """End the container as a kubelet does, and return its exit code: SIGTERM, and SIGKILL once the grace period is
        over, which is the manifest's, or `notice_s` seconds if that is less (`kubectl drain --grace-period`).
        """
        self.send(signal.SIGTERM)
        try:
            return self.wait(min(self._pod.grace_s, notice_s))
        except psutil.TimeoutExpired:
            self.kill()
            return 128 + signal.SIGKILL

    def kill(self) -> None:
        """Kill the container. Its first process has changed its user, so the end of its parent does not end it."""
        if self._process is not None and is_running(self._process):
            with suppress(psutil.NoSuchProcess):
                self.process().kill()
            self._process.kill()
            self._process.wait(30)

    def execute(self, words: Sequence[str], standard_input: bytes) -> None:
        """Run a command in the container as its user, as `kubectl exec` does. Raises CalledProcessError."""
        user, group = (self._pod.rights[each] for each in ("runAsUser", "runAsGroup"))
        inside = ["nsenter", "-t", str(self.process().pid), "-m", "-p", "-n", "-r", "-S", str(user), "-G", str(group)]
        subprocess.run(
            [*inside, "--", *words], input=standard_input, env={"PATH": "/usr/bin:/bin"}, timeout=60, check=True
        )

    def passes(self, probe: str) -> bool:
        """Whether the command of `probe` succeeds in the container."""
        words = self.spec[probe]["exec"]["command"]
        try:
            process = self.process()
        except psutil.NoSuchProcess:
            return False
        inside = ["nsenter", "-t", str(process.pid), "-m", "-p", "-n", "-r", "--", *words]
        return subprocess.run(inside, capture_output=True, timeout=30, check=False).returncode == 0

    def _environment(self) -> dict[str, str]:
        fields = {
            "spec.nodeName": self._pod.node,
            "status.podIP": self._pod.host.address,
            "metadata.labels['apps.kubernetes.io/pod-index']": str(self._pod.index),
        }
        variables = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOSTNAME": self._pod.name}
        if self._cluster.api:
            host, _, port = self._cluster.api.rpartition(":")
            variables |= {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        for each in self.spec.get("env", ()):
            source = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            variables[each["name"]] = fields[source] if source else each["value"]
        return {**self._cluster.variables, **variables}

    def _script(self) -> str:
        """The commands that make the container's root, enter it and become the manifest's user."""
        root = self._cluster.folder / f"{self._pod.name}.root"
        rights = {**self._pod.rights, **self.spec["securityContext"]}
        root.mkdir(exist_ok=True)
        lines = ["set -e", f"mount -t tmpfs -o size=16m,mode=755 root {root}"]
        programs = {path: path for path in (*SYSTEM, sys.base_prefix, str(ROOT), sys.prefix)}
        for path, source in {**programs, **self._cluster.folders}.items():
            lines += _bind(str(source), f"{root}{path}", read_only=True)
        lines += [f"mkdir -p {root}/proc {root}/dev/shm {root}/etc", f"mount -t proc proc {root}/proc"]
        lines += [f"touch {root}/dev/{name} && mount --bind /dev/{name} {root}/dev/{name}" for name in DEVICES]
        lines += [f"ln -s /proc/self/fd {root}/dev/fd", f"mount -t tmpfs -o size=64m,mode=1777 shm {root}/dev/shm"]
        lines += [f"cp -a /etc/{name} {root}/etc/ 2>/dev/null || true" for name in ETC]
        lines += [f"cp {self._hosts()} {root}/etc/hosts"]
        for mount in self.spec["volumeMounts"]:
            source = self._pod.volume(mount["name"])
            lines += _bind(str(source), f"{root}{mount['mountPath']}", read_only=mount.get("readOnly", False))
        if self._pod.has_account:
            lines += _bind(str(self._cluster.account), f"{root}{ACCOUNT}", read_only=True)
        if rights["readOnlyRootFilesystem"]:
            lines.append(f"mount -o remount,ro {root}")
        environment = self._environment()
        words = [_VARIABLE.sub(lambda found: environment[found[1]], word) for word in self.spec["command"]]
        become = ["setpriv", f"--reuid={rights['runAsUser']}", f"--regid={rights['runAsGroup']}", "--clear-groups"]
        become += ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        given = [f"{name}={value}" for name, value in environment.items()]
        lines.append(shlex.join(["exec", "chroot", str(root), *become, "env", "-i", "-C", "/", *given, *words]))
        return "\n".join(lines) + "\n"

    def _hosts(self) -> Path:
        file = self._cluster.folder / "hosts"
        names = {"localhost": "127.0.0.1", **self._cluster.names}
        file.write_text("".join(f"{address} {name}\n" for name, address in names.items()))
        return file


class Pod:
    """A pod of a workload: number `index` of it, on `node`."""

    def __init__(
        self, cluster: Cluster, name: str, template: Mapping[str, Any], index: int, node: str, host: Host
    ) -> None:
        self.name, self.index, self.node, self.host = name, index, node, host
        self._cluster, self._spec = cluster, template["spec"]
        self.rights = self._spec["securityContext"]
        self.has_account: bool = self._spec["automountServiceAccountToken"]
        self.grace_s = float(self._spec.get("terminationGracePeriodSeconds", 30))
        self._volumes = {each["name"]: self._make(each) for each in self._spec["volumes"]}
        self.containers = [Container(cluster, self, spec) for spec in self._spec["containers"]]

    def volume(self, name: str) -> Path:
        """The folder on this machine that is the pod's volume `name`."""
        return self._volumes[name]

    def _make(self, volume: Mapping[str, Any]) -> Path:
        group = self.rights["fsGroup"]
        match volume:
            case {"configMap": {"name": name}}:
                return self._cluster.config_maps[name]
            case {"persistentVolumeClaim": {"claimName": name}}:
                return self._cluster.claims[name]
            case {"hostPath": {"path": "/dev/shm"}}:
                return self._cluster.nodes[self.node]
        folder = self._cluster.folder / f"{self.name}.{volume['name']}"
        folder.mkdir(exist_ok=True)
        if "emptyDir" in volume:
            os.chown(folder, 0, group)
            folder.chmod(0o2777)
            return folder
        projected = volume["projected"]
        for source in projected["sources"]:
            for file in self._cluster.secrets[source["secret"]["name"]].iterdir():
                copy = Path(shutil.copy(file, folder))
                os.chown(copy, 0, group)
                copy.chmod(projected["defaultMode"])
        return folder


def _bind(source: str, target: str, *, read_only: bool) -> list[str]:
    if not os.path.exists(source):
        return []
    if os.path.islink(source):
        return [f"cp -P {source} {target}"]
    lines = [f"mkdir -p {shlex.quote(target)}", f"mount --bind {shlex.quote(source)} {shlex.quote(target)}"]
    return [*lines, *([f"mount -o remount,bind,ro {shlex.quote(target)}"] if read_only else [])]


def given_to(user: int, folder: Path) -> Path:
    """`folder`, with all in it, owned by `user`."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user, user)
    return folder


def until_all(containers: Iterable[Container], probe: str, timeout_s: float) -> None:
    """Wait until `probe` passes in all containers. Raises AssertionError if one ends, or after `timeout_s`."""
    deadline, waiting = time.monotonic() + timeout_s, list(containers)
    while waiting:
        for each in waiting:
            assert each.running, f"{each.name} has ended:\n{each.log.read_text()[-3000:]}"
        waiting = [each for each in waiting if not each.passes(probe)]
        assert time.monotonic() < deadline, f"{probe} of {[each.name for each in waiting]} does not pass"
        time.sleep(2.0)  # each try starts a process in each container
