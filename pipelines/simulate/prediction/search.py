"""The search for the best cluster of a given number of GPUs: splits, then staleness bounds, then tensor parallelism.

Each dimension is searched at the best point of those before it. The whole grid would cost ten times as much, and a
finer one can follow around the result. Other splits change the trainer's speed by `DECLINE`, fitted to the Laminar
paper's 32B model, and other tensor-parallel sizes the engine's by `FIXED`, an estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from pipelines.simulate.prediction.cluster import Cluster
from pipelines.simulate.prediction.machines import Memory, kv_gigabytes
from pipelines.simulate.prediction.measurement import Prediction
from pipelines.simulate.prediction.world import PredictedWorld

DECLINE = 0.207
"""n times as many GPUs train n^(1 - DECLINE) times as fast."""
FIXED = 0.5
"""Share of a decode step of one request that more GPUs do not shorten: launches and all-reduces."""
SPLITS = (1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Shares of the GPUs that train."""
STALENESS = (1, 2, 4)
LEVEL = 0.02
"""Throughputs that differ by less are level: then the lower staleness is recommended."""


@dataclass(frozen=True)
class Candidate:
    """A cluster and what is predicted for it; `error` says why it is impossible."""

    kind: str
    """The dimension that was varied."""
    cluster: Cluster
    prediction: Prediction | None = None
    error: str = ""

    @property
    def name(self) -> str:
        """Its split, replicas and staleness bound."""
        cluster = self.cluster
        bound = cluster.config.experience.max_staleness
        return (
            f"{cluster.train_gpus} train, {cluster.replicas} replicas of {cluster.gpus_per_replica}, staleness {bound}"
        )


def predict(cluster: Cluster) -> Prediction:
    """The prediction of one cluster. Raises ValueError for one that cannot work."""
    return PredictedWorld(cluster).run().prediction()


def search(
    cluster: Cluster,
    *,
    memory: Memory | None = None,
    predict: Callable[[Cluster], Prediction] = predict,
) -> Iterator[Candidate]:
    """The candidates with their predictions, each as soon as it is known; the present cluster comes first.

    With `memory` clusters in which something does not fit are impossible, and tensor parallelism is searched, too. All
    are without [autoscaling], whose bounds are those of the present cluster.
    """
    autoscaled = cluster.autoscaled or cluster.config.autoscaling is not None
    cluster = replace(cluster, config=replace(cluster.config, autoscaling=None), autoscaled=autoscaled)
    seen: dict[tuple[int, int, int, int], Candidate] = {}

    def tried(kind: str, clusters: Iterator[Cluster]) -> Iterator[Candidate]:
        for each in clusters:
            bound = each.config.experience.max_staleness
            key = (each.train_gpus, each.replicas, each.gpus_per_replica, bound)
            if key in seen:
                continue
            try:
                if memory is not None:
                    memory.check(each)
                seen[key] = Candidate(kind, each, predict(each))
            except ValueError as error:
                seen[key] = Candidate(kind, each, error=str(error))
            yield seen[key]

    yield from tried("present", iter([cluster]))
    first = cluster
    if memory is not None and (larger := fitting(cluster, memory)) is not cluster:
        yield from tried("tensor parallelism", iter([first := larger]))
    yield from tried("split", splits(first))
    if not any(each.prediction for each in seen.values()):
        return  # `recommended` names the reason
    best = recommended(list(seen.values()))
    if best.cluster.config.placement.rules.admitted_batches is None:  # else the bound paces nothing
        yield from tried("staleness", (with_staleness(best.cluster, bound) for bound in STALENESS))
    if memory is not None:
        best = recommended(list(seen.values()))
        yield from tried("tensor parallelism", tensor_parallel(best.cluster, memory))


def recommended(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest candidate, or of those that are level with it the one with the lowest staleness.

    Raises ValueError, with the first reason, if none is possible.
    """
    possible = [(each.prediction, each) for each in candidates if each.prediction is not None]
    if not possible:
        raise ValueError(candidates[0].error if candidates else "there are no candidates")
    fastest = max(found.trained_tokens_per_s for found, _ in possible)
    level = [each for each in possible if each[0].trained_tokens_per_s >= (1 - LEVEL) * fastest]
    return min(level, key=lambda each: (each[0].staleness_mean, -each[0].trained_tokens_per_s))[1]


def splits(cluster: Cluster) -> Iterator[Cluster]:
    """`cluster` with other shares of its GPUs for the trainer, in whole replicas."""
    if cluster.colocated:
        return
    for share in SPLITS:
        replicas = round(cluster.gpus * (1 - share) / cluster.gpus_per_replica)
        train = cluster.gpus - replicas * cluster.gpus_per_replica
        if replicas and train:
            yield with_replicas(with_trainer(cluster, train), replicas)


def with_trainer(cluster: Cluster, gpus: int) -> Cluster:
    """`cluster` with a trainer on `gpus` GPUs: the part of its steps that grows with tokens scales."""
    emulation = cluster.config.trainer.emulation
    fixed, faster = emulation.seconds(0), (gpus / cluster.train_gpus) ** (1 - DECLINE)
    rows = tuple((tokens, fixed + (seconds - fixed) / faster) for tokens, seconds in emulation.step_s)
    changed = replace(emulation, step_s=rows)
    config = replace(cluster.config, trainer=replace(cluster.config.trainer, emulation=changed))
    return replace(cluster, config=config, train_gpus=gpus)


def with_replicas(cluster: Cluster, replicas: int) -> Cluster:
    """`cluster` with so many replicas, of one process each."""
    rollout = replace(cluster.config.rollout, replicas=replicas, processes=1)
    placement = replace(cluster.config.placement, max_replicas=max(replicas, cluster.config.placement.max_replicas))
    return replace(cluster, config=replace(cluster.config, rollout=rollout, placement=placement))


def with_staleness(cluster: Cluster, bound: int) -> Cluster:
    """`cluster` with another staleness bound, which paces admission."""
    return replace(
        cluster,
        config=replace(cluster.config, experience=replace(cluster.config.experience, max_staleness=bound)),
    )


def fitting(cluster: Cluster, memory: Memory) -> Cluster:
    """`cluster`, or the same with twice, four times, ... as many GPUs a replica if the weights need them.

    KV of the larger replicas is as configured. `cluster` too if its GPUs are too few for any size.
    """
    gpus = cluster.gpus_per_replica
    while gpus < cluster.gpus and not cluster.colocated:
        try:
            kv_gigabytes(memory.machine, gpus, memory.weights_gb)
        except ValueError:
            gpus *= 2
            continue
        return cluster if gpus == cluster.gpus_per_replica else _with_size(cluster, gpus)
    return cluster


def tensor_parallel(cluster: Cluster, memory: Memory) -> Iterator[Cluster]:
    """`cluster` with replicas of half and of twice as many GPUs, where the weights fit.

    GPUs that fill no replica train; where trainer and replicas share all GPUs, only sizes that leave none over count.
    """
    now, rollout = cluster.gpus_per_replica, cluster.config.rollout
    present_gb = kv_gigabytes(memory.machine, now, memory.weights_gb)
    capacity = rollout.kv_capacity or rollout.most_slots * cluster.config.context
    for gpus in (now // 2, now * 2):
        generate = cluster.replicas * now
        if not 0 < gpus <= generate or (cluster.colocated and generate % gpus):
            continue
        try:
            kv = int(capacity * kv_gigabytes(memory.machine, gpus, memory.weights_gb) / present_gb)
        except ValueError:
            continue  # the weights do not fit
        other = _with_size(cluster, gpus)
        changed = replace(other.config.rollout, kv_capacity=kv)
        yield replace(other, config=replace(other.config, rollout=changed))


def _with_size(cluster: Cluster, gpus: int) -> Cluster:
    """`cluster` with replicas of `gpus` GPUs, and the engine's speed on them."""
    rollout, share = cluster.config.rollout, cluster.gpus_per_replica / gpus
    roofline = rollout.emulation.roofline
    held = FIXED * roofline.decode_ms[0][1]
    changed = replace(
        roofline,
        decode_ms=tuple((batch, held + (ms - held) * share) for batch, ms in roofline.decode_ms),
        kv_ns=roofline.kv_ns * share,
        prefill_us=roofline.prefill_us * share,
    )
    new = replace(rollout, emulation=replace(rollout.emulation, roofline=changed))
    other = replace(cluster, config=replace(cluster.config, rollout=new), gpus_per_replica=gpus)
    generate = cluster.replicas * cluster.gpus_per_replica
    replicas = max(1, generate // gpus)
    train = cluster.train_gpus if cluster.colocated else cluster.gpus - replicas * gpus
    return with_replicas(with_trainer(other, train), replicas)
