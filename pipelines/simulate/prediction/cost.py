"""What an optimizer step of a predicted run costs: GPU hours, bytes in Kafka, and their prices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipelines.simulate.prediction.cluster import Cluster
from pipelines.simulate.prediction.log_bytes import StepShape, log_bytes
from pipelines.simulate.prediction.measurement import Prediction

DAY_S = 86_400.0


@dataclass(frozen=True)
class ResourcePrices:
    """In any currency; 0 is not priced."""

    gpu_hour: float = 0.0
    kafka_gb: float = 0.0
    """Of 10⁹ bytes written, each copy."""


@dataclass(frozen=True)
class StepCost:
    """The cost of one optimizer step. `log_bytes` is one copy, by topic; prices are None where none was given."""

    seconds: float
    trajectories: int
    prompt_tokens: int
    response_tokens: int
    train_gpu_hours: float
    rollout_gpu_hours: float
    log_bytes: Mapping[str, float]
    copies: int
    gpu_price: float | None
    kafka_price: float | None

    @property
    def gpu_hours(self) -> float:
        """GPU hours of trainer and rollouts."""
        return self.train_gpu_hours + self.rollout_gpu_hours

    @property
    def written_bytes(self) -> float:
        """Bytes of all topics and copies."""
        return self.copies * sum(self.log_bytes.values())

    @property
    def price(self) -> float | None:
        """The sum of the prices that were given; None without any."""
        given = [each for each in (self.gpu_price, self.kafka_price) if each is not None]
        return sum(given) if given else None

    def to_json(self) -> dict[str, Any]:
        """All fields by name, with the sums and those of a day."""
        days = DAY_S / self.seconds
        sums = {"gpu_hours": self.gpu_hours, "written_bytes": self.written_bytes, "price": self.price}
        day = {name: value if value is None else value * days for name, value in sums.items()}
        return {**asdict(self), **sums, "day": {"steps": days, **day}}


def cost_of(
    cluster: Cluster, predicted: Prediction, prices: ResourcePrices, *, copies: int = 3, weights_gb: float = 0.0
) -> StepCost:
    """The cost of a step of `cluster`, which was `predicted`; its version has `weights_gb` GB of weights."""
    config, stride = cluster.config, cluster.config.rollout.emulation.stride
    (task,), trajectories = config.prompts.mixture, config.experience.global_batch
    seconds = predicted.iteration_s
    prompt_tokens = task.prompt_tokens * stride
    tokens = predicted.trained_tokens_per_s * seconds / trajectories
    step = StepShape(
        trajectories=trajectories,
        samples_per_prompt=task.samples_per_prompt,
        prompt_tokens=prompt_tokens,
        response_tokens=max(1, round(tokens - prompt_tokens)),
        micro_batch_tokens=config.experience.micro_batch_tokens * stride,
        progress_tokens=config.rollout.progress_tokens * stride,
        rollouts=config.rollout.processes,
        seconds=seconds,
        chunks=math.ceil(weights_gb * 1e9 / config.relay.chunk_bytes),
    )
    written = log_bytes(step)
    rollouts = cluster.replicas * cluster.gpus_per_replica
    return StepCost(
        seconds=seconds,
        trajectories=trajectories,
        prompt_tokens=prompt_tokens,
        response_tokens=step.response_tokens,
        train_gpu_hours=cluster.train_gpus * seconds / 3600,
        rollout_gpu_hours=rollouts * seconds / 3600,
        log_bytes=written,
        copies=copies,
        gpu_price=prices.gpu_hour * (cluster.train_gpus + rollouts) * seconds / 3600 if prices.gpu_hour else None,
        kafka_price=prices.kafka_gb * copies * sum(written.values()) / 1e9 if prices.kafka_gb else None,
    )
