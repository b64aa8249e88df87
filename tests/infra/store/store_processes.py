"""Processes that write to and read from a store, to be killed; run as `python store_processes.py ROLE ROOT ...`.

The bytes of a version are a function of its number; readers check them against the seal alone.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blake3 import blake3

from infra.store import incoming_version
from infra.store.errors import VersionGone
from infra.store.incoming_version import VersionMemory
from infra.store.weight_store import WeightStore
from schemas.records import PolicyVersion

SIZE = 1 << 20
CHUNK = 1 << 14


def content(version: PolicyVersion) -> bytes:
    """The bytes of a version."""
    return random.Random(str(version)).randbytes(CHUNK) * (SIZE // CHUNK)


def add(store: WeightStore, version: PolicyVersion) -> str:
    """Write a version chunk by chunk, seal it, and return its blake3."""
    data = content(version)
    incoming = store.begin(version, SIZE)
    for start in range(0, SIZE, CHUNK):
        incoming.view[start : start + CHUNK] = data[start : start + CHUNK]
    return incoming.seal().blake3


def start(role: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a process of this file."""
    command = [sys.executable, __file__, role, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])


def _write_for_ever(root: Path, epoch: str) -> None:
    with WeightStore(root, keep=2) as store:
        number = 0
        while True:
            number += 1
            add(store, PolicyVersion(int(epoch), number))
            store.evict()
            print(number, flush=True)


def _write_and_die(root: Path, point: str) -> None:
    """Kill this process at `point` of writing version 1.2."""
    store = WeightStore(root)
    incoming = store.begin(PolicyVersion(1, 2), SIZE)
    data = content(PolicyVersion(1, 2))
    if point == "begun":
        _die()
    incoming.view[: SIZE // 2] = data[: SIZE // 2]
    if point == "half":
        _die()
    incoming.view[SIZE // 2 :] = data[SIZE // 2 :]
    if point == "hashed":
        VersionMemory.finish = _die_after(lambda *_: None)  # type: ignore[method-assign]
    if point == "seal written":
        incoming_version.write_seal = _die_after(incoming_version.write_seal)
    if point == "visible":
        VersionMemory.rename = _die_after(VersionMemory.rename)  # type: ignore[method-assign]
    incoming.seal()


def _read(root: Path, count: str) -> None:
    """Pin random versions `count` times, compare their bytes slowly with their seals, and print the results."""
    counts = {"complete": 0, "gone": 0, "wrong": 0}
    choose = random.Random(os.getpid())
    with WeightStore(root) as store:
        while counts["complete"] + counts["wrong"] < int(count):
            versions = store.versions()
            if not versions:
                continue
            version = choose.choice(versions)
            try:
                with store.pin(version) as path:
                    seal = store.seal(version)
                    digest = blake3()
                    for first in range(0, SIZE, SIZE // 4):
                        time.sleep(0.001)
                        with path.open("rb") as file:
                            file.seek(first)
                            digest.update(file.read(SIZE // 4))
                    valid = digest.hexdigest() == seal.blake3 and path.stat().st_size == seal.bytes == SIZE
                    counts["complete" if valid else "wrong"] += 1
            except VersionGone:
                counts["gone"] += 1
            except FileNotFoundError:
                counts["wrong"] += 1
    print(json.dumps(counts), flush=True)


def _pin_for_ever(root: Path, version: str) -> None:
    with WeightStore(root) as store, store.pin(PolicyVersion.parse(version)):
        print("pinned", flush=True)
        time.sleep(60)


def _open_for_ever(root: Path) -> None:
    with WeightStore(root):
        print("open", flush=True)
        time.sleep(60)


def _die_after(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> None:
        function(*arguments)
        _die()

    return call


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    roles: dict[str, Callable[..., None]] = {
        "write": _write_for_ever,
        "write-and-die": _write_and_die,
        "read": _read,
        "pin": _pin_for_ever,
        "open": _open_for_ever,
    }
    roles[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
