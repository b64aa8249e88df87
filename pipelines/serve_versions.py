"""The process that answers people: `python -m pipelines.serve_versions DIR`, a child of the gateway.

It reads the run's configuration and then each request from its standard input, a JSON line each, and writes lines with
what was generated. It runs on the CPU at a low priority, whatever the rollouts use, and is the first to be killed if
the machine's memory ends. So are the commands that write evicted versions to DIR.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from operators.gateway.config import GatewayConfig
from operators.rollout.backend import TransformersSpec
from operators.rollout.evicted_versions import EvictedVersions
from operators.rollout.serve_requests import PULL_CHECK_S, ServedRequest, ServedRequests, find_version
from operators.rollout.stop_strings import StoppingEngine
from pipelines.config import Config, parse_config
from pipelines.distribution import LAMINAR
from pipelines.shards import store_folder
from schemas.records import Sampling

NICENESS = 5


def main(work: Path) -> None:
    """Serve until standard input ends; evicted versions are written to `work`."""
    os.nice(NICENESS)
    with suppress(OSError):  # only Linux has it
        Path("/proc/self/oom_score_adj").write_text("1000")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    answers = os.dup(1)
    os.dup2(2, 1)  # libraries print
    config = parse_config(json.loads(sys.stdin.readline()), "the gateway's configuration")
    orders: queue.Queue[Mapping[str, Any] | None] = queue.Queue()
    threading.Thread(target=_read, args=(orders,), daemon=True).start()
    backend = _spec(config).open()
    served = ServedRequests(StoppingEngine(backend.engine(), backend.decode), backend.weights, _evicted(config, work))
    while True:
        try:
            order = orders.get(not served.busy, PULL_CHECK_S if len(served) else None)
        except queue.Empty:
            for event in served.step():
                _write(answers, event)
            continue
        if order is None:
            return
        if "cancel" in order:
            served.cancel(order["cancel"])
        elif "list" in order:
            _write(answers, {"id": order["id"], "versions": [str(each) for each in sorted(backend.weights.versions())]})
        else:
            served.submit(request_of(order))


def request_of(order: Mapping[str, Any]) -> ServedRequest:
    """The request that an order of the gateway stands for."""
    sampling = Sampling(
        float(order["temperature"]),
        float(order["top_p"]),
        0,
        int(order["max_tokens"]),
        tuple(order["stop_token_ids"]),
        0,  # the draws of requests differ by their ids
        tuple(order["stop_strings"]),
    )
    return ServedRequest(order["id"], order["version"], np.array(order["tokens"], np.int32), sampling)


def _spec(config: Config) -> TransformersSpec:
    gateway = config.gateway or GatewayConfig()
    rollout = replace(
        config.rollout,
        engine="transformers",
        processes=1,
        replicas=1,
        slots=gateway.serve_requests,
        kv_capacity=None,
        context=config.context,
        dtype="float32",
        threads=gateway.serve_threads,
        tensor_parallel=1,
        gpus=(),
        vllm={},
        token_sampler="laminar",
        environments=(),
    )
    return TransformersSpec(rollout, config.model_folder(), store_folder(config))


def _evicted(config: Config, work: Path) -> EvictedVersions:
    """Commands have as many threads as this process."""
    threads = str((config.gateway or GatewayConfig()).serve_threads)
    environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
    environment["PYTHONWARNINGS"] = "ignore"  # the last line of a command that fails is its error
    environment["TMPDIR"] = str(work)  # it is removed with this process, also if that is killed
    run = ("--run", str(config.run_folder.absolute()))
    listing, pull = (*LAMINAR, "weights", "list", "-n", "0", "--json", *run), (*LAMINAR, "weights", "pull", *run)
    return EvictedVersions(listing, pull, work, environment, find_version)


def _read(orders: queue.Queue[Mapping[str, Any] | None]) -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    orders.put(None)


def _write(descriptor: int, event: Mapping[str, Any]) -> None:
    data = json.dumps(event).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
