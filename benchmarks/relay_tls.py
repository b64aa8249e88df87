"""The cost of encryption between relays: one hop in clear text and encrypted, without a limit and over a slow link.

    OMP_NUM_THREADS=1 python -m benchmarks.relay_tls [--megabytes 500] [--rate 100] [--repetitions 5]

The source is another process; every chunk is checked on arrival. Both ways alternate; shares are ratios of medians of
the same run. The rate by CPU is that of the slower end if it had a core of its own: bytes by CPU seconds of the busier
process, which other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
from crc32c import crc32c
from rich.console import Console
from rich.table import Table

from benchmarks.processes import OthersWatch
from infra.certificates import write_relay_files
from infra.transport.chunk_registry import BlobBuffer, ChunkRegistry
from infra.transport.chunked_blob import ChunkedBlob
from infra.transport.endpoint import Endpoint
from infra.transport.peer import dial
from infra.transport.serving import Server
from infra.transport.throttle import Link
from infra.transport.tls import Tls
from schemas.records import PolicyVersion

RUN, TOKEN, NAME = "benchmark", "a-token-of-a-benchmark", "its-bytes"
VERSION = PolicyVersion(1, 1)
CHUNK = 8 << 20
AHEAD = 4
GOALS = {"without a limit": 0.5, "over the link": 0.95}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rate", type=float, default=100.0, help="rate of the slow link, 10^6 bytes/s")
    parser.add_argument("--slow-megabytes", type=int, default=200)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    watch = OthersWatch()
    with tempfile.TemporaryDirectory() as folder:
        _, certificate, authority = write_relay_files(Path(folder))
        tls = Tls(str(certificate), str(authority))
        rows = [
            ("without a limit", *_both(options.megabytes, None, tls, options.repetitions)),
            ("over the link", *_both(options.slow_megabytes, options.rate, tls, options.repetitions)),
        ]
    table = Table(title=f"One hop, MB/s; others used {100 * watch.share():.0f} % of the CPU time")
    for column in ("", "clear text", "encrypted", "share", "goal", "", "clear by CPU", "encrypted by CPU", "share"):
        table.add_column(column, justify="right")
    for what, clear, over_tls in rows:
        share, goal = over_tls.wall / clear.wall, GOALS[what]
        outcome = "met" if share >= goal else "missed"
        by_cpu = f"{clear.cpu:.0f}", f"{over_tls.cpu:.0f}", f"{over_tls.cpu / clear.cpu:.2f}"
        table.add_row(what, f"{clear.wall:.0f}", f"{over_tls.wall:.0f}", f"{share:.2f}", f"{goal}", outcome, *by_cpu)
    Console(width=110).print(table)


class Rates(NamedTuple):
    """MB/s by the clock, and by the CPU time of the busier end."""

    wall: float
    cpu: float


def _both(megabytes: int, rate: float | None, tls: Tls, repetitions: int) -> tuple[Rates, Rates]:
    """The rates in clear text and encrypted: medians of alternating repetitions."""
    ways: dict[bool, Tls | None] = {False: None, True: tls}
    found: dict[bool, list[Rates]] = {way: [] for way in ways}
    for _ in range(repetitions):
        for way, files in ways.items():
            found[way].append(_hop(megabytes * 1_000_000, rate, files))
    clear, over_tls = (Rates(*map(statistics.median, zip(*found[way], strict=True))) for way in ways)
    return clear, over_tls


def _hop(size: int, rate: float | None, tls: Tls | None) -> Rates:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    source = context.Process(target=_serve, args=(theirs, size, rate, tls), daemon=True)
    source.start()
    try:
        port, checksums = ours.recv()
        memory = memoryview(bytearray(size))
        blob = ChunkedBlob(VERSION, "kv", NAME, size, CHUNK, checksums)
        limit = Link(None if rate is None else rate * 1_000_000)
        peer = dial(f"127.0.0.1:{port}", RUN, TOKEN, -1, blob, memory, limit, False, tls)
        began, cpu = time.perf_counter(), time.process_time()
        for chunk in range(min(AHEAD, blob.chunks)):
            peer.request(chunk)
        for chunk in range(blob.chunks):
            _, valid = peer.receive_chunk()
            if not valid:
                sys.exit(f"chunk {chunk} is corrupted")
            if chunk + AHEAD < blob.chunks:
                peer.request(chunk + AHEAD)
        took, own = time.perf_counter() - began, time.process_time() - cpu
        ours.send("CPU time")
        peer.close()
        return Rates(size / 1e6 / took, size / 1e6 / max(own, ours.recv()))
    finally:
        ours.close()
        source.join(5)
        source.kill()


def _serve(pipe: Connection, size: int, rate: float | None, tls: Tls | None) -> None:
    data = memoryview(np.random.default_rng(0).integers(0, 256, size, np.uint8).tobytes())
    registry = ChunkRegistry(lambda key: None)
    registry.add((str(VERSION), "kv", NAME), BlobBuffer(data))
    limit = Link(None if rate is None else rate * 1_000_000)
    server = Server(registry, RUN, Endpoint(token=TOKEN, tls=tls), limit, {})
    pipe.send((server.port, tuple(crc32c(data[at : at + CHUNK]) for at in range(0, size, CHUNK))))
    began = time.process_time()
    try:
        pipe.recv()
        pipe.send(time.process_time() - began)
        pipe.recv()
    except EOFError:
        server.close()


if __name__ == "__main__":
    main()
