"""Which devices trainer and rollouts have, as far as the configuration alone tells."""

from __future__ import annotations

from operators.autoscaler.config import AutoscalingConfig
from operators.rollout.config import RolloutConfig
from operators.trainer.training_config import TrainingConfig


def check_devices(trainer: TrainingConfig, rollout: RolloutConfig, autoscaling: AutoscalingConfig | None) -> None:
    """Raise ValueError if trainer and rollouts are to use the same GPU at once, or if the trainer cannot have each
    number of ranks that rollouts may leave it of `autoscaling.devices`."""
    if autoscaling is not None and autoscaling.devices:
        _check_split(trainer, rollout, autoscaling)
    elif shared := trainer.named_gpus & set(rollout.gpus):
        raise ValueError(
            f"trainer.gpus and rollout.gpus share {sorted(shared)}: the trainer uses "
            f"{sorted(trainer.named_gpus)}, rollouts {sorted(rollout.gpus)}. Give each its own"
        )


def _check_split(trainer: TrainingConfig, rollout: RolloutConfig, autoscaling: AutoscalingConfig) -> None:
    devices = autoscaling.devices
    setting, most = f"autoscaling.devices = {devices}", devices - min(autoscaling.minimum, rollout.processes)
    if rollout.engine == "emulated":
        raise ValueError(f"{setting} needs a trainer with ranks, not rollout.engine = 'emulated'")
    if trainer.batch_shares < most:
        raise ValueError(f"{setting} leaves the trainer up to {most} ranks: set trainer.batch_shares = {most} or more")
    if rollout.processes >= devices:
        raise ValueError(f"rollout.processes is {rollout.processes}, but {setting} has to leave the trainer one")
    needed = {
        "trainer.shard_ranks": (trainer.shard_ranks, 0),
        "trainer.context_ranks": (trainer.context_ranks, 1),
        "trainer.learner.share_device": (trainer.learner.share_device, False),
        "rollout.tensor_parallel": (rollout.tensor_parallel, 1),
    }
    for name, (value, one) in needed.items():
        if value != one:
            raise ValueError(f"{setting} needs {name} = {one}, not {value}: the trainer may have any number of ranks")
    if trainer.device == "cuda" and (len(trainer.gpus) != devices or rollout.gpus != trainer.gpus[::-1]):
        raise ValueError(
            f"{setting} needs all of them in trainer.gpus, such as {list(range(devices))}, and the same from the last "
            f"to the first in rollout.gpus, not {list(trainer.gpus)} and {list(rollout.gpus)}"
        )
