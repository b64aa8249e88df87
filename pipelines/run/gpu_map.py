"""Checks which GPUs of this machine the trainer and the rollouts of a run use, before anything is started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipelines.config import Config


def gpu_problems(config: Config, visible: Sequence[str]) -> Iterator[str]:
    """Reasons why the run cannot use the GPUs `visible` on this machine; none for an emulated run."""
    if config.emulated:
        return
    rollout, trainer, count = config.rollout, config.trainer, len(visible)
    try:
        taken = {gpu for process in range(rollout.processes) for gpu in rollout.gpus_of(process, visible)}
    except ValueError as error:
        yield str(error)
        return
    if trainer.device.startswith("cuda") and not count:
        yield f"trainer.device = {trainer.device!r}, but this machine has no GPU: set trainer.device = 'cpu'"
    if absent := sorted(gpu for gpu in trainer.named_gpus if gpu >= count > 0):
        yield f"the trainer uses GPU {absent[0]}, but this machine has {count} GPUs, numbered from 0"
    shared = taken & {visible[gpu] for gpu in trainer.named_gpus if gpu < count}
    if shared and count > 1:  # a machine with one GPU has no other way
        yield (
            f"trainer and rollouts share GPU {', '.join(sorted(shared))}: give each its own with trainer.gpus and "
            "rollout.gpus, such as trainer.gpus = [0, 1, 2, 3] and rollout.gpus = [4, 5, 6, 7]"
        )
