"""One version from several sources: processes that each serve their byte range of one file, over the relay's frames.

`benchmarks.publication --remote` prints its rate beside that of ranks that send their parts over gloo. Each chunk is
compared with its checksum, as relays do.
"""

from __future__ import annotations

import mmap
import multiprocessing
import statistics
import time
from contextlib import ExitStack
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

from infra.store.chunks import DEFAULT_CHUNK_BYTES, chunk_checksums
from infra.transport.chunk_registry import BlobBuffer, ChunkRegistry
from infra.transport.chunked_blob import ChunkedBlob
from infra.transport.endpoint import Endpoint
from infra.transport.fetch import Fetch, TransferCounts
from infra.transport.peer import Peer, dial
from infra.transport.schedules import Pull
from infra.transport.serving import Server
from infra.transport.throttle import Link
from schemas.records import PolicyVersion

_RUN, _TOKEN = "benchmark", "0123456789abcdef" * 2


def frames_rate(file: Path, sources: int, repetitions: int) -> float:
    """Bytes a second, the median, at which one process receives `file` from so many others, each of which has a part.

    Raises RuntimeError if a source fails.
    """
    blob, context = blob_of(file, sources), multiprocessing.get_context("spawn")
    memory = memoryview(bytearray(blob.bytes))
    with ExitStack() as started:
        ports = []
        for chunks in shares(blob.chunks, sources):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, file, blob, chunks), daemon=True)
            process.start()
            started.callback(process.join)
            started.callback(ours.close)  # which ends it
            theirs.close()
            ports.append(ours.recv())
        return blob.bytes / statistics.median(_receive(blob, memory, ports) for _ in range(repetitions))


def blob_of(file: Path, sources: int) -> ChunkedBlob:
    """The bytes of `file` in chunks, of which each of so many sources has some."""
    size = file.stat().st_size
    chunk_bytes = min(DEFAULT_CHUNK_BYTES, -(-size // (4 * sources)))
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data,
        memoryview(data) as view,
    ):
        checks = chunk_checksums(view, chunk_bytes)
    return ChunkedBlob(PolicyVersion(1, 1), "full", "0" * 64, size, chunk_bytes, checks)


def shares(chunks: int, sources: int) -> list[range]:
    """The chunks of each source: consecutive ones, of which all together are `chunks`."""
    ends = [chunks * source // sources for source in range(sources + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def _receive(blob: ChunkedBlob, memory: memoryview, ports: list[int]) -> float:
    """The seconds until all of `blob` is in `memory`."""

    def connect(source: int) -> Peer:
        return dial(f"127.0.0.1:{ports[source]}", _RUN, _TOKEN, -1, blob, memory, Link(), False)

    pulls = (
        Pull(chunk, source, at)
        for source, own in enumerate(shares(blob.chunks, len(ports)))
        for at, chunk in enumerate(own)
    )
    plan = sorted(pulls, key=lambda pull: pull.step)  # all sources at once
    began = time.perf_counter()
    if not Fetch(blob, BlobBuffer(memory, blob), plan, (), connect, TransferCounts()).run(lambda: False, lambda: None):
        raise RuntimeError("a source failed")
    return time.perf_counter() - began


def _serve(pipe: Connection, file: Path, blob: ChunkedBlob, chunks: range) -> None:
    with file.open("rb") as opened:
        buffer = BlobBuffer(memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)), blob)
    for chunk in chunks:
        buffer.mark_present(chunk)
    registry = ChunkRegistry(lambda key: None)
    registry.add(blob.key, buffer)
    server = Server(registry, _RUN, Endpoint(token=_TOKEN), Link(), {})
    pipe.send(server.port)
    try:
        pipe.recv()
    except EOFError:
        server.close()
