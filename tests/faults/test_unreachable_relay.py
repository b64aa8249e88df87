"""Relays on hosts of their own, one of which advertises an address that the others do not reach."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w
from blake3 import blake3
from faults.cluster import Cluster
from faults.network import Network, within
from faults.without_network import skipped_without_network
from synthetic_run import manifest

from infra.files import create_secret
from infra.kafka.producer import BoundedProducer
from infra.machine import VARIABLE
from infra.processes import is_running, spawn
from infra.store.chunks import chunk_checksums
from infra.store.weight_store import WeightStore
from pipelines.config import load_config
from pipelines.distribution import LAMINAR
from pipelines.run.topics import make_topics
from schemas.codec import encode
from schemas.records import PolicyVersion
from schemas.topics import RELAY

pytestmark = pytest.mark.usefixtures("killed_programs")
MACHINES = ("m0", "m1", "m2")
WRONG = 1
ADDRESS = "10.77.0.5:7400"
"""What relay `WRONG` advertises: an address of its other network, which its peers have no way to."""
CHUNK = 1024
TIMEOUT_S = 400.0


class Tier:
    """Placement and a relay on each of `MACHINES`, all submitted there; the test publishes versions from the first."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.folder, self.run = folder, f"unreachable-{os.getpid()}"
        self._network = stack.enter_context(Network(("k1", *MACHINES)))
        self._cluster = Cluster(self._network, ("k1",), folder)
        stack.callback(self._cluster.stop)
        self._cluster.start()
        self._file = folder / "run.toml"
        create_secret(folder / "token")
        listening = {"listen": "0.0.0.0", "port": 7400, "token_file": str(folder / "token"), "clear_text": True}
        settings = {
            "run": {"name": self.run, "folder": str(folder)},
            "kafka": {"bootstrap_servers": self._cluster.client.bootstrap_servers},
            "prompts": {"source": "synthetic"},
            "rollout": {"engine": "emulated"},
            "relay": {**listening, "chunk_bytes": CHUNK, "deltas": False},
        }
        self._file.write_text(tomli_w.dumps(settings))
        within(self._host, lambda: make_topics(load_config(self._file)))
        self._store = stack.enter_context(WeightStore(folder / "store-0", 4))
        self.versions = 0
        self.publish()
        self._processes = {"placement": self._submit("m0", "placement")}
        stack.callback(self._kill)
        for number, machine in enumerate(MACHINES):
            wrong = ("--set", f"relay.advertise={ADDRESS}") if number == WRONG else ()
            store = ("--set", f"relay.store={folder}/store-{number}")
            self._processes[machine] = self._submit(machine, "relay", "--index", str(number), *store, *wrong)
            self.until(lambda number=number: self._has_place(number))  # so the last one is to fetch from the wrong one

    @property
    def _host(self) -> Any:
        return self._network.hosts["m0"]

    def publish(self) -> None:
        """Put another version into the first machine's store and publish its manifest, as a trainer does."""
        self.versions += 1
        version, data = PolicyVersion(1, self.versions), os.urandom(10 * CHUNK)
        arriving = self._store.begin(version, len(data))
        arriving.view[:] = data
        arriving.seal()
        self._store.release_writer()
        published = replace(
            manifest(1, self.versions),
            parent=PolicyVersion(1, self.versions - 1) if self.versions > 1 else None,
            file=f"{version}.safetensors",
            bytes=len(data),
            blake3=blake3(data).hexdigest(),
            batch_offsets=(),
            chunk_bytes=CHUNK,
            chunk_checksums=chunk_checksums(memoryview(data), CHUNK),
        )
        value, headers = encode(published)

        def send() -> None:
            with BoundedProducer(self._cluster.client) as producer:
                producer.send(RELAY.name(self.run), value, headers=headers, partition=0)

        within(self._host, send)

    def relays(self) -> dict[int, dict[str, Any]]:
        """What `laminar relays` shows on the last machine, by relay."""
        where = ("--run", self.run, "-b", self._cluster.client.bootstrap_servers, "--json")
        command = self._network.command(MACHINES[-1], *LAMINAR, "relays", *where)
        shown = subprocess.run(command, capture_output=True, text=True, cwd=self.folder, timeout=200, check=True)
        return {row["relay"]: row for row in json.loads(shown.stdout)["relays"]}

    def _has_place(self, number: int) -> bool:
        return number > WRONG or self.relays().get(number, {}).get("position") is not None

    def log(self, process: str) -> str:
        return (self.folder / f"{process}.log").read_text()

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; no process may end meanwhile."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            logs = "\n".join(f"{each}: {self.log(each)[-2000:]}" for each in self._processes)
            assert all(map(is_running, self._processes.values())), logs
            assert time.monotonic() < deadline, logs
            time.sleep(0.5)

    def _submit(self, machine: str, *words: str) -> psutil.Process:
        pipeline, *options = words
        name = machine if pipeline == "relay" else pipeline
        command = ("env", f"{VARIABLE}={machine}", *LAMINAR, "submit", pipeline, str(self._file), *options)
        return spawn(self._network.command(machine, *command), self.folder / f"{name}.log", die_with_parent=True)

    def _kill(self) -> None:
        for process in self._processes.values():
            if is_running(process):
                process.kill()
                process.wait(30)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Tier]:
    with skipped_without_network(), ExitStack() as stack:
        yield Tier(stack, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_relay_that_peers_cannot_reach_gets_no_place(tier: Tier) -> None:
    found: dict[int, dict[str, Any]] = {}

    def is_left_out() -> bool:
        """Whether every machine has the newest version, and the relay has no place; publishes the next version if not:
        only who fetches one finds out."""
        nonlocal found
        found = tier.relays()
        complete = {number for number, row in found.items() if f"1.{tier.versions}" in row["versions"]}
        if complete != {0, 1, 2}:
            return False
        if found[WRONG]["role"] == "unreachable":
            return True
        tier.publish()
        return False

    tier.until(is_left_out)
    assert {number: (row["position"], row["role"]) for number, row in found.items()} == {
        0: (0, "master"),
        WRONG: (None, "unreachable"),
        2: (1, "relay"),
    }
    assert {number: row["reported_by"] for number, row in found.items()} == {0: None, WRONG: "2 of m2", 2: None}
    assert found[WRONG]["address"] == ADDRESS
    named = f"as others cannot connect: relay {WRONG} at {ADDRESS} (reported by relay 2 of machine m2)"
    assert named in tier.log("placement")
    warning = f"relay {WRONG} of machine m1 cannot be reached from here: {ADDRESS}: "
    assert warning in tier.log("m2")
    assert "set relay.advertise there" in tier.log("m2")
    assert "cannot be reached" not in tier.log("m1")
