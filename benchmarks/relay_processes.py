"""A relay in its own process, to measure and to kill; run as `python relay_processes.py ROOT RELAY RATE`.

Each line of input is a chain or a manifest in JSON. Each line of output is the relay's status in JSON: its address and
the versions that it holds; it is printed on every change. RATE is the rate of its links in bytes/s; 0: no limit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from infra.store.weight_store import WeightStore
from infra.transport.endpoint import Endpoint
from infra.transport.relay_node import RelayNode
from infra.transport.throttle import Link
from schemas.plain import from_plain, to_plain
from schemas.records import PolicyVersion, RelayChain, RelayLink, WeightVersion

RUN, TOKEN = "r", "a-token-of-a-benchmark"


class RelayProcess:
    """Starts a relay process. `statuses` are its reports, newest last; `first_seen`: when each version arrived."""

    def __init__(self, root: Path, relay: int, rate: float = 0.0) -> None:
        self.root, self.relay = root, relay
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(root), str(relay), str(rate)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
        assert self._process.stdout is not None
        self.statuses: list[dict[str, Any]] = [json.loads(self._process.stdout.readline())]
        self.first_seen: dict[str, float] = {}
        self.link = RelayLink(relay, self.status["address"], "here", str(root))
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def status(self) -> dict[str, Any]:
        return self.statuses[-1]

    def send(self, record: RelayChain | WeightVersion) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({type(record).__name__: to_plain(record)}) + "\n")
        self._process.stdin.flush()

    def has(self, version: str) -> bool:
        return version in self.status["versions"]

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
                self.statuses.append(status := json.loads(line))
                for version in status["versions"]:
                    self.first_seen.setdefault(version, status["at"])
        except ValueError:  # the pipe was closed, or the relay was killed in the middle of a line
            return


def main(root: Path, relay: int, rate: float) -> None:
    """Run a relay until the input ends."""
    store = WeightStore(root, 2)
    link = Link(rate or None), Link(rate or None)
    node = RelayNode(store, RUN, relay, Endpoint(token=TOKEN), *link)
    manifests: dict[PolicyVersion, WeightVersion] = {}

    def report() -> None:
        before: dict[str, Any] = {}
        while True:
            arrival = node.arriving()
            now = {
                "address": node.address,
                "versions": [str(version) for version in store.versions()],
                "arrived": arrival.arrived if arrival else 0,
                "received": node.receiving.bytes_passed,
                "sent": node.sending.bytes_passed,
                "lost": node.counts.lost,
                "requested_again": node.counts.requested_again,
                "corrupted": node.counts.corrupted,
            }
            if now != before:
                print(json.dumps({**now, "at": time.monotonic()}), flush=True)
                before = now
            time.sleep(0.005)

    threading.Thread(target=report, daemon=True).start()
    for line in sys.stdin:
        ((kind, value),) = json.loads(line).items()
        if kind == "RelayChain":
            node.set_chain(from_plain(RelayChain, value))
        else:
            manifest = from_plain(WeightVersion, value)
            manifests[manifest.version] = manifest
            node.set_manifests(manifests.values())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
