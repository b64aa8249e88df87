"""A machine that joins, in its own process: a relay and a replica over links with a rate limit, which they share.

Run as `python -m benchmarks.elastic_joiner ROOT NUMBER RATE`. The first line of output has its addresses. Each line of
input is a record, each further line of output a record that the relay or the replica publishes: its bytes and headers.
"""

from __future__ import annotations

import base64
import json
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.models import qwen2
from infra.clocks import wall_ms
from infra.machine import machine_name
from infra.store.weight_store import WeightStore
from infra.transport.endpoint import Endpoint
from infra.transport.kv_transfer import KVTransfers
from infra.transport.relay_node import RelayNode
from infra.transport.throttle import Link
from operators.io.repartition import Placed
from operators.relay.relay import StatusMaker
from operators.rollout.config import RolloutConfig
from operators.rollout.heartbeats import replica_status
from operators.rollout.replica import Replica
from operators.rollout.staged.member import StageMember
from operators.rollout.staged.replica_staging import ReplicaStaging
from operators.rollout.staged.service import StageService
from operators.rollout.transformers_engine import TransformersEngine
from schemas.codec import decode, encode
from schemas.records import Assignment, RelayChain, Release, Reserve, StageGroup, WeightVersion

CONTEXT, SLOTS = 128, 64
RUN = "r"
HEARTBEAT_S = 0.25
FIRST_RELAY = 10
"""The number of the first joiner's relay."""


def build_model(seed: int = 0) -> Qwen2ForCausalLM:
    """A model of 98 M parameters in float32."""
    torch.manual_seed(seed)
    sizes = qwen2(768, 2_304, 13, 12, 8_192, context=CONTEXT)
    config = Qwen2Config(**sizes, bos_token_id=None, eos_token_id=None, initializer_range=0.1)
    return Qwen2ForCausalLM(config).eval()


def to_line(record: Any) -> str:
    """`record` as one line of text."""
    value, headers = encode(record)
    return json.dumps([base64.b64encode(value).decode(), [[name, text.decode()] for name, text in headers]])


def from_line(line: str) -> Any:
    """The record in a line of text."""
    value, headers = json.loads(line)
    return decode(base64.b64decode(value), [(name, text.encode()) for name, text in headers])[0]


def main(root: Path, number: int, rate: float) -> None:
    """Run a relay and a replica until the input ends."""
    torch.set_num_threads(1)
    sending, receiving = Link(rate or None), Link(rate or None)
    store = WeightStore(root, 2)
    endpoint = Endpoint(token="a-token-of-a-benchmark")
    node = RelayNode(store, RUN, FIRST_RELAY + number, endpoint, sending, receiving)
    transfers = KVTransfers(RUN, endpoint, 1 << 30, sending=sending, receiving=receiving)
    engine = TransformersEngine(build_model(seed=number + 1), slots=SLOTS, context=CONTEXT)
    member = StageMember(number, 1, engine, store.root)
    staging = ReplicaStaging(member, store, StageService(transfers))
    config = RolloutConfig(slots=SLOTS, context=CONTEXT)
    replica = Replica(number, 1, engine, store, str, wall_ms, config, kv_transfers=transfers, staging=staging)
    maker = StatusMaker(node, str(root), time.monotonic(), machine_name())
    lock = threading.Lock()

    def publish(record: Any) -> None:
        with lock:
            print(to_line(record), flush=True)

    def beat() -> None:
        while True:
            held = sorted(store.versions(), reverse=True)
            relay = maker.make(held, 0, time.monotonic(), wall_ms())
            load = replica.engine.status()
            publish(relay)
            if (arrival := maker.arrival(relay)) is not None:
                publish(arrival)
            publish(staging.status(wall_ms()))
            publish(replica_status(number, number, 1, replica.state, engine.version, load, 0.0, RUN, replica.reserved))
            time.sleep(HEARTBEAT_S)

    commands: queue.Queue[Any] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            commands.put(from_line(line))
        commands.put(None)

    print(json.dumps({"relay": node.address, "replica": transfers.address}), flush=True)
    for run in (beat, listen):
        threading.Thread(target=run, daemon=True).start()
    while True:
        while not commands.empty() or not replica.busy():
            try:
                command = commands.get(timeout=0.02)
            except queue.Empty:
                break
            if command is None:
                return
            for event in _handle(command, replica, node):
                publish(event.assignment if isinstance(event, Placed) else event)
        for event in replica.step():
            publish(event.assignment if isinstance(event, Placed) else event)


def _handle(command: Any, replica: Replica, node: RelayNode) -> list[Any]:
    match command:
        case RelayChain():
            node.set_chain(command)
        case WeightVersion():
            node.set_manifests([command])
            replica.announce(command.version, command)
        case Assignment():
            replica.accept(command)
        case Reserve():
            replica.reserve(command)
        case Release():
            return list(replica.hand_over(command))
        case StageGroup():
            replica.lead(command)
    return []


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
