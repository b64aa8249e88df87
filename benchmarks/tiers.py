"""How soon a replica generates under the newest version, by where its machine has it: device, memory, disk, object
store, peers.

    python -m benchmarks.tiers [--rate 8] [--changed 0.01] [--rounds 3] [--object-store s3://bucket/folder] [--json]

A model of 98 M parameters (bfloat16, 196 MB), and a machine whose relay gets it over a link of `--rate` MB/s.
`delta`: the version before is on the disk, and `--changed` of the weights have changed since; only the delta is
transferred. The copies on disk are dropped from the page cache, as after a reboot. `objects`: no other machine has
the version, and `--object-store` is one; by default it is a folder on this disk, without a network before it. Then
the engine, which is built, loads the version and draws the first token of a request. Medians of `--rounds`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.elastic import CHUNK, publish
from benchmarks.elastic_joiner import CONTEXT, RUN, build_model
from infra.storage import StorageFolder, open_storage
from infra.store.chunks import chunk_checksums
from infra.store.deltas import encode_delta
from infra.store.layout import Layout
from infra.store.names import default_root, weight_file
from infra.store.object_tier import ObjectTier
from infra.store.weight_store import WeightStore
from infra.transport.endpoint import Endpoint
from infra.transport.relay_node import RelayNode
from infra.transport.throttle import Link
from operators.rollout.engine import Request
from operators.rollout.transformers_engine import TransformersEngine
from pipelines.present.report.machine import describe_machine
from schemas.records import PolicyVersion, RelayChain, RelayLink, Sampling, WeightDelta, WeightVersion

TIERS = ("device", "memory", "disk", "delta", "objects", "peers")
POLL_S = 0.005


@dataclass(frozen=True)
class Start:
    """Seconds until the machine's memory has the version, and until the first token; megabytes that it received."""

    in_memory: float
    first_token: float
    received: float


class Versions:
    """Two versions, `parent` and `child`, in the store of a machine that serves them."""

    def __init__(self, folder: Path, changed: float) -> None:
        self.store, self.parent = publish(folder)
        with self.store.read(self.parent.version) as before:
            after = np.frombuffer(before, np.uint8).copy()
            layout = Layout(self.parent.tensors)
            body = after[len(layout.header) :].view(np.uint16)
            chosen = np.random.default_rng(0).random(len(body)) < changed
            body[chosen] ^= 1
            delta = encode_delta(before, memoryview(after), layout.spans())
        version = PolicyVersion(1, 1)
        self.store.keep = 2
        with self.store.begin(version, len(after)) as arriving:
            arriving.view[:] = memoryview(after)
            seal = arriving.seal()
        self.store.add_delta(version, delta)
        self.store.release_writer()
        short = WeightDelta(
            self.parent.version, self.parent.blake3, len(delta), chunk_checksums(memoryview(delta), CHUNK)
        )
        self.child: WeightVersion = replace(
            self.parent,
            version=version,
            parent=self.parent.version,
            file=weight_file(version),
            blake3=seal.blake3,
            chunk_checksums=chunk_checksums(memoryview(after), CHUNK),
            delta=short,
        )

    def copy(self, manifest: WeightVersion, into: WeightStore) -> None:
        """Write the version to `into`."""
        with self.store.read(manifest.version) as data, into.begin(manifest.version, len(data)) as copy:
            copy.view[:] = data
            copy.seal()
        into.release_writer()
        drop_from_cache(into.path(manifest.version))


def drop_from_cache(file: StorageFolder) -> None:
    """Let the next read of a local file come from its disk."""
    if isinstance(file, Path):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(tier: str, versions: Versions, folder: Path, rate: float, shared: StorageFolder) -> Start:
    """One start from `tier`; `shared` is a folder of the object store."""
    child = versions.child
    root = default_root(f"benchmark-tiers-{os.getpid()}")
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        store = stack.enter_context(WeightStore(root, 2))
        copies = stack.enter_context(WeightStore(folder / tier, 1))
        if tier in ("disk", "delta"):
            versions.copy(child if tier == "disk" else versions.parent, copies)
        if tier in ("device", "memory"):
            versions.copy(child, store)
        objects = stack.enter_context(closing(ObjectTier(versions.store, shared, 1, 0.0)))
        if tier == "objects":
            objects.copy(child.version)
            drop_from_cache(shared / weight_file(child.version))
        engine = TransformersEngine(build_model(seed=1), slots=1, context=CONTEXT)
        if tier == "device":
            engine.load(store.path(child.version), child.version)
        endpoint = Endpoint(token="a-token-of-a-benchmark")
        master = stack.enter_context(closing(RelayNode(versions.store, RUN, 0, endpoint)))
        began = time.perf_counter()
        receiving = Link(rate * 1e6)
        node = RelayNode(store, RUN, 1, endpoint, Link(), receiving, copies=copies, objects=objects)
        stack.enter_context(closing(node))
        relays = (node,) if tier == "objects" else (master, node)
        links = tuple(RelayLink(each.relay, each.address, f"h{each.relay}", f"s{each.relay}") for each in relays)
        node.set_chain(RelayChain(1, links, (), "chain", 0))
        node.set_manifests([child])
        while child.version not in store.versions():
            time.sleep(POLL_S)
        in_memory = time.perf_counter() - began
        if tier != "device":
            engine.load(store.path(child.version), child.version)
        engine.submit(Request("p0.0", np.arange(2, 10, dtype=np.int32), Sampling(1.0, 1.0, 0, 16, (), 0)))
        while not engine.status().tokens_generated:
            engine.step()
        first_token = time.perf_counter() - began
        engine.close()
        return Start(in_memory, first_token, receiving.bytes_passed / 1e6)


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--rate", type=float, default=8.0, help="MB/s of the machine's link")
    arguments.add_argument("--changed", type=float, default=0.01, help="share of the weights that a version changes")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--object-store", default="", help="a folder in an object store; default: on this disk")
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Start] = {}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as place:
        versions = Versions(Path(place), options.changed)
        shared = open_storage(options.object_store or f"{place}/shared") / f"tiers-{os.getpid()}"
        try:
            for tier in TIERS:
                rounds = [
                    measure(tier, versions, Path(place) / f"copies-{n}", options.rate, shared)
                    for n in range(options.rounds)
                ]
                columns = zip(*((each.in_memory, each.first_token, each.received) for each in rounds), strict=True)
                found[tier] = Start(*map(median, columns))
        finally:
            versions.store.close()
            shutil.rmtree(versions.store.root, ignore_errors=True)
    if options.json:
        print(json.dumps({"machine": describe_machine(), "tiers": {name: vars(each) for name, each in found.items()}}))
    else:
        Console(width=120).print(_table(found))


def _table(found: Mapping[str, Start]) -> Table:
    table = Table(title="start of a replica under the newest version, by where its machine has it")
    for column in ("tier", "in memory, s", "first token, s", "received, MB"):
        table.add_column(column, justify="left" if column == "tier" else "right")
    for name, each in found.items():
        table.add_row(name, f"{each.in_memory:.2f}", f"{each.first_token:.2f}", f"{each.received:.1f}")
    return table


if __name__ == "__main__":
    main()
