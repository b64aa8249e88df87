"""Trajectories/s through PipelineRL's file streams and through TransferQueue, on this machine.

    make streams-env && .venv-streams/bin/python benchmarks/streams/others.py --trajectories 20000

Neither is durable: the files are flushed but never synced, and TransferQueue holds everything in memory. PipelineRL's
method (pipelinerl/streams.py, commit 0c810be) is reimplemented here, because PipelineRL is not a package: a trajectory
is a line of JSON, written by orjson and flushed, and read by json. TransferQueue 0.1.11 runs with its in-memory storage
and batches as large as Laminar's Kafka records. Prints JSON: system, operation, trajectories/s.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROWS = 256


def trajectory(tokens: int, source: np.random.Generator) -> dict[str, Any]:
    """A trajectory as in the experience benchmark: an eighth of its tokens is the prompt."""
    prompt_tokens, response_tokens = tokens // 8, tokens - tokens // 8
    return {
        "prompt_ids": source.integers(0, 32_000, prompt_tokens).astype(np.int32),
        "input_ids": source.integers(0, 32_000, response_tokens).astype(np.int32),
        "logprobs": -source.random(response_tokens, np.float32),
        "loss_mask": np.ones(response_tokens, np.int8),
        "reward": 1.0,
    }


def files(rows: list[dict[str, Any]], count: int) -> Iterator[tuple[str, float]]:
    """Seconds to write, then to read, `count` of `rows` as PipelineRL's file streams."""
    import orjson

    with tempfile.TemporaryDirectory(prefix="laminar-streams-") as folder:
        path = Path(folder) / "0.jsonl"

        def write() -> None:
            with open(path, "a") as file:
                for index in range(count):
                    line = orjson.dumps(rows[index % len(rows)], option=orjson.OPT_SERIALIZE_NUMPY)
                    file.write(line.decode())
                    file.write("\n")
                    file.flush()

        def read() -> None:
            with open(path) as file:
                for _ in range(count):
                    json.loads(file.readline())
                    file.tell()

        yield "write", timed(write)
        yield "read", timed(read)


def transfer_queue(rows: list[dict[str, Any]], count: int) -> Iterator[tuple[str, float]]:
    """Seconds to put, then to get, `count` of `rows`, ROWS at a time."""
    import ray
    import torch
    import transfer_queue as tq
    from tensordict import TensorDict

    # Slots, not cores: each actor takes one, and init waits for ever for actors without a slot.
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False)
    tq.init()
    try:
        names = [name for name in rows[0] if name != "reward"]
        columns = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in names}
        fields = TensorDict({**columns, "reward": torch.ones(len(rows), 1)}, batch_size=len(rows))
        keys = [[f"{first + row}" for row in range(ROWS)] for first in range(0, count, ROWS)]

        def put() -> None:
            for batch in keys:
                tq.kv_batch_put(keys=batch, partition_id="train", fields=fields, tags=[{}] * ROWS)

        def get() -> None:
            for batch in keys:
                tq.kv_batch_get(keys=batch, partition_id="train")

        yield "put", timed(put)
        yield "get", timed(get)
    finally:
        tq.close()
        ray.shutdown()


def timed(work: Callable[[], None]) -> float:
    """The seconds that `work` takes."""
    started = time.monotonic()
    work()
    return time.monotonic() - started


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--trajectories", type=int, default=20_480)
    arguments.add_argument("--tokens", type=int, default=512)
    options = arguments.parse_args()
    count = options.trajectories // ROWS * ROWS
    source = np.random.default_rng(0)
    rows = [trajectory(options.tokens, source) for _ in range(ROWS)]
    found = [
        {"system": system, "operation": operation, "per_second": count / seconds}
        for system, measure in (("PipelineRL's files", files), ("TransferQueue, in memory", transfer_queue))
        for operation, seconds in measure(rows, count)
    ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
