"""Run as a program: runs every attack in the sandbox, as an answer that the verifier `code` scores.

    python sandbox_world.py '{"namespaces": true, "newest_abi": 1000}' [attack...]

Prints a line of JSON for each attack: its name, its score, the effects found outside, its seconds.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from sandbox_attacks import ATTACKS, PRELUDE

from infra.sandbox.run import Isolation, run_python
from operators.score.verifiers import code

KEY = 0x4C616D69
MARK = "laminar-attack"
_SECONDS = {"time": 0.4}
"""Time limits of attacks by kind; others end by themselves on any machine."""


class World:
    """Files, processes and other objects that attacks must not change."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="laminar-world-", dir="/tmp"))
        self.secret = self.folder / "secret"
        self.token = "TOKEN-" + secrets.token_hex(16)
        self.secret.write_text(self.token)
        self.secret.chmod(0o600)
        with contextlib.suppress(OSError):  # the file system does not support it
            os.setxattr(self.secret, "user.mark", b"mark")
        self.victim = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        self.name = "\0laminar-world-" + secrets.token_hex(4)
        self.path = str(self.folder / "socket")
        self.sockets = [self._listen(socket.AF_UNIX, self.name), self._listen(socket.AF_UNIX, self.path)]
        self.port = socket.create_server(("127.0.0.1", 0))
        self.port.setblocking(False)
        self.before = self._state()

    def definitions(self) -> str:
        """The facts that attacks use, as Python."""
        facts = {
            "VICTIM": self.victim.pid, "PARENT": os.getpid(), "SECRET": str(self.secret), "OUTSIDE": str(self.folder),
            "NAME": self.name, "PATH": self.path, "PORT": self.port.getsockname()[1], "KEY": KEY,
        }  # fmt: skip
        return "".join(f"{name} = {value!r}\n" for name, value in facts.items())

    def effects(self) -> list[str]:
        """The changes, and the remaining processes."""
        now = self._state()
        found = [f"{key}: {self.before[key]} became {now[key]}" for key in now if now[key] != self.before[key]]
        end = time.monotonic() + 20.0
        while (left := self._processes()) and time.monotonic() < end:
            time.sleep(0.005)
        return found + [f"left: {each}" for each in left]

    def close(self) -> None:
        """Restore the state."""
        self.victim.kill()
        self.victim.wait()
        for each in (*self.sockets, self.port):
            each.close()
        shutil.rmtree(self.folder)

    def _listen(self, family: int, address: str) -> socket.socket:
        made = socket.socket(family, socket.SOCK_DGRAM)
        made.bind(address)
        made.setblocking(False)
        return made

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"victim": self.victim.poll()}
        for pid in (self.victim.pid, os.getpid()):
            state[f"scheduling of {pid}"] = (
                os.sched_getaffinity(pid), os.sched_getscheduler(pid), os.getpriority(os.PRIO_PROCESS, pid),
                Path(f"/proc/{pid}/limits").read_text(), Path(f"/proc/{pid}/oom_score_adj").read_text(),
                str(psutil.Process(pid).ionice()), os.getsid(pid), os.getpgid(pid),
            )  # fmt: skip
        for path in (self.folder, self.secret, Path(os.__file__)):
            status = path.stat()
            state[f"status of {path}"] = (
                status.st_mode, status.st_uid, status.st_size, status.st_nlink, status.st_mtime_ns, status.st_ctime_ns
            )  # fmt: skip
        state["content"] = self.secret.read_text()
        state["files"] = sorted(os.listdir(self.folder))
        state["received"] = [list(self._received(each)) for each in self.sockets]
        with contextlib.suppress(BlockingIOError):
            state["connected"] = self.port.accept()[1]
        state.setdefault("connected", None)
        places = (Path("/tmp"), Path("/dev/shm"), Path("/dev/mqueue"))
        state["names"] = [str(each) for place in places if place.exists() for each in place.glob(MARK + "*")]
        state["queues"] = [
            f"{kind}: {line}"
            for kind in ("shm", "msg", "sem")
            if (table := Path(f"/proc/sysvipc/{kind}")).exists()
            for line in table.read_text().splitlines()
            if line.split()[0] == str(KEY)
        ]
        keys = Path("/proc/keys")
        state["keys"] = [line for line in keys.read_text().splitlines() if MARK in line] if keys.exists() else []
        return state

    def _received(self, listening: socket.socket) -> Iterator[bytes]:
        with contextlib.suppress(BlockingIOError):
            while True:
                yield listening.recv(100)

    def _processes(self) -> list[str]:
        """Processes below this one but for the victim and the zygote, which has none below it."""
        children = [each for each in psutil.Process().children(recursive=True) if each.pid != self.victim.pid]
        return [str(each) for each in children[1:]]


def main() -> None:
    """Run the attacks named, or all."""
    isolation = Isolation(**json.loads(sys.argv[1]))
    code.run_python = functools.partial(run_python, isolation=isolation)  # type: ignore[assignment]
    for name in sys.argv[2:] or ATTACKS:
        world = World()
        try:
            print(json.dumps(attack(name, world)), flush=True)
        finally:
            world.close()


def attack(name: str, world: World) -> dict[str, Any]:
    """Run one attack and collect its effects."""
    kind = name.partition(":")[0]
    program = world.definitions() + PRELUDE + ATTACKS[name]
    expected = world.token if kind == "answers" else "EFFECT"
    begun = time.monotonic()
    value = code.verify(program, {"tests": [{"input": "", "output": expected}]}, _SECONDS.get(kind, 60.0), 512)
    return {"attack": name, "value": value, "effects": world.effects(), "seconds": time.monotonic() - begun}


if __name__ == "__main__":
    main()
