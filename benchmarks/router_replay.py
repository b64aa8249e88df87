"""Bytes per token that router replay would add to the log: which experts each layer of a mixture chose for a token.

    OMP_NUM_THREADS=1 python -m benchmarks.router_replay
    OMP_NUM_THREADS=1 python -m benchmarks.router_replay --json --broker

Routers with random weights, in the proportions of Qwen3-30B-A3B (48 layers, 8 of 128 experts), route random hidden
states. The choices are encoded as a record would have them: a byte an expert, sorted within a layer, in columns of one
layer each; then compressed with zstd, as a producer with `compression.type=zstd` does. A trained router chooses less
evenly, so its choices compress better: `--skew` adds a bias of that standard deviation to the logits of experts.
`--broker` also produces the columns to a Kafka broker of its own, a record for each `--record-tokens` tokens, and reads
the size of the log: what `rollout.progress_tokens` and Kafka's batches make of it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from math import comb, log2
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from benchmarks.tables import print_rows
from infra.kafka.admin import admin_client
from infra.kafka.broker import BrokerConfig, start_broker
from infra.kafka.producer import BoundedProducer
from infra.kafka.properties import ClientProperties

LAYERS, EXPERTS, CHOSEN, WIDTH = 48, 128, 8, 64
TOKEN_BYTES = 9
"""Of a response token without replay: id, logprob and a bit of the mask."""


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--tokens", type=int, default=4096)
    arguments.add_argument("--skew", type=float, nargs="+", default=[0.0, 1.0, 2.0])
    arguments.add_argument("--broker", action="store_true", help="measure the log of a broker, too")
    arguments.add_argument("--record-tokens", type=int, default=512)
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    rows = [measure(options.tokens, skew) for skew in options.skew]
    if options.broker:
        stored = stored_bytes([choices(options.tokens, skew) for skew in options.skew], options.record_tokens)
        rows = [row | {"in Kafka's log": size / options.tokens} for row, size in zip(rows, stored, strict=True)]
    title = f"{LAYERS} layers, {CHOSEN} of {EXPERTS} experts; {TOKEN_BYTES} bytes a token without replay"
    print_rows(rows, title, options.json, digits=4)


def measure(tokens: int, skew: float) -> dict[str, float]:
    """Bytes per token of the choices for `tokens` tokens, plain and compressed, and the least for even choices."""
    chosen = choices(tokens, skew)
    plain = columns(chosen)
    compressed = len(pa.Codec("zstd").compress(plain))
    return {
        "skew": skew,
        "plain": len(plain) / tokens,
        "zstd": compressed / tokens,
        "even choices, at least": LAYERS * log2(comb(EXPERTS, CHOSEN)) / 8,
        "busiest expert, times its share": float(
            np.mean([np.bincount(layer.ravel(), minlength=EXPERTS).max() for layer in chosen.transpose(1, 0, 2)])
            / (tokens * CHOSEN / EXPERTS)
        ),
    }


def columns(chosen: np.ndarray) -> bytes:
    """`chosen`, uint8[tokens, layers, chosen], by layer and place: neighbours are alike."""
    return chosen.transpose(1, 2, 0).tobytes()


def stored_bytes(batches: Sequence[np.ndarray], record_tokens: int) -> list[int]:
    """Bytes of the log of a topic with the choices of each of `batches`, produced with compression.type=zstd."""
    with tempfile.TemporaryDirectory() as folder, start_broker(BrokerConfig(Path(folder) / "kafka")) as broker:
        topics = [f"choices-{number}" for number in range(len(batches))]
        with admin_client(broker.client()) as admin:
            for topic in topics:
                admin.create_topics({topic: {"num_partitions": 1, "replication_factor": 1}})
        settings = {"bootstrap.servers": broker.bootstrap_servers, "compression.type": "zstd"}
        producer = BoundedProducer(ClientProperties(settings))
        for topic, chosen in zip(topics, batches, strict=True):
            for begin in range(0, len(chosen), record_tokens):
                producer.send(topic, columns(chosen[begin : begin + record_tokens]))
        producer.close(60.0)
        logs = [Path(folder) / "kafka" / "log" / f"{topic}-0" for topic in topics]
        return [sum(segment.stat().st_size for segment in log.glob("*.log")) for log in logs]


def choices(tokens: int, skew: float) -> np.ndarray:
    """The experts of each token and layer, uint8[tokens, layers, chosen], rising, of routers with random weights over
    hidden states that change from layer to layer, as those of a residual stream do.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, generator=generator)
    found = []
    for _ in range(LAYERS):
        router = torch.randn(EXPERTS, WIDTH, generator=generator)
        bias = skew * torch.randn(EXPERTS, generator=generator)
        logits = hidden / hidden.norm(dim=1, keepdim=True) @ router.T + bias
        found.append(logits.topk(CHOSEN).indices.sort(1).values)
        hidden = hidden + 0.3 * torch.randn(tokens, WIDTH, generator=generator)
    return torch.stack(found, 1).to(torch.uint8).numpy()


if __name__ == "__main__":
    main()
