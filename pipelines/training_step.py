"""The step of a trainer rank: rank 0 trains and publishes, other ranks follow; an emulated run only takes the time."""

from __future__ import annotations

from infra.storage import StorageFolder, open_storage
from operators.io.config import ShardConfig
from operators.io.fold_records import FoldStep
from operators.trainer.emulate_training import EmulateTraining
from pipelines.config import Config
from pipelines.sequence_lengths import longest_sequence
from pipelines.shards import store_folder


def checkpoints_of(config: Config) -> StorageFolder:
    """The folder of the run's checkpoints."""
    folder = config.trainer.checkpoint_folder
    return open_storage(folder) / config.run.name if folder else config.run_folder / "checkpoints"


def training_step(config: Config, source: ShardConfig, rank: int) -> tuple[FoldStep, ShardConfig]:
    """The step of `rank` over `source`, and `source` as it is read: from the newest checkpoint on."""
    if config.emulated_training:
        scale, stride = config.run.time_scale, config.rollout.emulation.stride
        return EmulateTraining(config.trainer, source, scale, stride, config.experience.divisions), source
    from operators.trainer.publishing import PublishSettings
    from operators.trainer.train_batches import TrainBatches  # deferred: imports torch
    from operators.trainer.train_follower import TrainFollower

    checkpoints = checkpoints_of(config)
    if rank:
        follower = TrainFollower(
            config=config.trainer,
            shard=source,
            model=config.model_folder(),
            checkpoints=checkpoints,
            rank=rank,
            divisions=config.experience.divisions,
            dtype=config.rollout.weights_dtype,
            longest=longest_sequence(config),
        )
        return follower, follower.resumed()
    train = TrainBatches(
        config=config.trainer,
        shard=source,
        model=config.model_folder(),
        store=store_folder(config),
        checkpoints=checkpoints,
        result=config.run_folder / "model",
        keep_versions=config.relay.keep_versions,
        publish=PublishSettings(
            config.relay.token(),
            config.relay.chunk_bytes,
            config.relay.max_megabytes_per_s,
            config.relay.deltas,
            config.relay.tls(),
        ),
        divisions=config.experience.divisions,
        dtype=config.rollout.weights_dtype,
        longest=longest_sequence(config),
    )
    return train, train.resumed()
