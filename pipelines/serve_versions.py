"""The process that answers people: `python -m pipelines.serve_versions CONFIG`, a child of the gateway.

It reads a JSON line for each request from its standard input, and writes lines with what was generated. It runs on the
CPU at a low priority, whatever the rollouts use.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from operators.gateway.config import GatewayConfig
from operators.rollout.backend import TransformersSpec
from operators.rollout.serve_requests import ServedRequest, ServedRequests
from pipelines.config import Config, load_config
from pipelines.shards import store_folder
from schemas.records import Sampling

NICENESS = 5


def main(file: Path) -> None:
    """Serve until standard input ends."""
    os.nice(NICENESS)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    answers = os.dup(1)
    os.dup2(2, 1)  # libraries print
    orders: queue.Queue[Mapping[str, Any] | None] = queue.Queue()
    threading.Thread(target=_read, args=(orders,), daemon=True).start()
    backend = _spec(load_config(file)).open()
    served = ServedRequests(backend.engine(), backend.weights)
    while True:
        try:
            order = orders.get(block=not len(served))
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
        environments=(),
    )
    return TransformersSpec(rollout, config.model_folder(), store_folder(config))


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
