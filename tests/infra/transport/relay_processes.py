"""A relay as a process of its own, to be killed; run as `python relay_processes.py ROOT RELAY RATE`.

A line of JSON in is a chain or a manifest; a line out says where it listens, then, on every change, what it holds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from infra.store.weight_store import WeightStore
from infra.transport.node import RelayNode
from infra.transport.throttle import Link
from schemas.plain import from_plain, to_plain
from schemas.records import PolicyVersion, RelayChain, RelayLink, WeightVersion


class RelayProcess:
    """The test's end: what it says is in `said`, the newest last."""

    def __init__(self, root: Path, relay: int, rate: float) -> None:
        self.root, self.relay = root, relay
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(root), str(relay), str(rate)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        assert self._process.stdout is not None
        self.said: dict[str, Any] = json.loads(self._process.stdout.readline())
        self.link = RelayLink(relay, self.said["address"], "here", str(root))
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, record: RelayChain | WeightVersion) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({type(record).__name__: to_plain(record)}) + "\n")
        self._process.stdin.flush()

    def has(self, version: str) -> bool:
        return version in self.said["versions"]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                self.said = json.loads(line)
        except ValueError:  # closed, or killed in the middle of a line
            return


def main(root: Path, relay: int, rate: float) -> None:
    """Be a relay until the input ends."""
    store = WeightStore(root, 2)
    link = Link(rate), Link(rate)
    node = RelayNode(store, "r", relay, sending=link[0], receiving=link[1])
    manifests: dict[PolicyVersion, WeightVersion] = {}

    def report() -> None:
        before: dict[str, Any] = {}
        while True:
            arrival = node.arriving()
            now = {
                "address": node.address,
                "versions": [str(version) for version in store.versions()],
                "arrived": arrival.arrived if arrival else 0,
                "arrived_at": time.monotonic(),
                "received": node.receiving.passed,
                "sent": node.sending.passed,
                "lost": node.counts.lost,
                "corrupted": node.counts.corrupted,
            }
            if any(now[name] != before.get(name) for name in now if name != "arrived_at"):
                print(json.dumps(now), flush=True)
                before = now
            time.sleep(0.002)

    threading.Thread(target=report, daemon=True).start()
    for line in sys.stdin:
        ((kind, value),) = json.loads(line).items()
        if kind == "RelayChain":
            node.obey(from_plain(RelayChain, value))
        else:
            manifest = from_plain(WeightVersion, value)
            manifests[manifest.version] = manifest
            node.learn(manifests.values())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
