"""What a rank checks before it trains: its device, the model's files, memory, and settings in common with others."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import torch

from infra.counted import counted
from infra.memory import usable_memory
from infra.sizes import size_text
from infra.store.weight_files import model_fingerprint, weights_sample
from operators.trainer.assembly import CannotTrain
from operators.trainer.memory_plan import PINNED, UnknownSize, check_memory, offloaded_bytes, plan_rank, shape_of
from operators.trainer.training_config import TrainingConfig

log = logging.getLogger(__name__)


def common_settings(config: TrainingConfig, divisions: int, dtype: str) -> tuple[str, ...]:
    """What all ranks need in common but their number and the model, "name=value" each."""
    names = ("context_ranks", "optimizer_steps", "checkpoint_every", "lost_batches", "learner")
    learner = replace(config.learner, name=Path(config.learner.name).name)  # its file may be elsewhere there
    values = _flat("trainer", {name: getattr(replace(config, learner=learner), name) for name in names})
    shares = f"trainer.batch_shares={config.shares}"
    # Release 0.2.0, whose ranks may be among them, calls the divisions so.
    return (f"experience.shards={divisions}", f"rollout.dtype={dtype}", shares, *values)


def _flat(name: str, value: object) -> Iterator[str]:
    if is_dataclass(value):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _flat(f"{name}.{key}", each)
    else:
        yield f"{name}={value}"


def fingerprint(model: Path, rank: int) -> str:
    """The fingerprint of the model of `rank`. Raises CannotTrain if this machine does not have it."""
    try:
        return model_fingerprint(model)
    except FileNotFoundError as error:
        raise CannotTrain(
            f"rank {rank} has no model at {model} on machine {platform.node()} ({error}): copy the folder of "
            "model.path there, or mount it"
        ) from error


def weights_note(model: Path) -> str:
    """What identifies the weights in `model`, one word, and then where they are."""
    return f"{weights_sample(model)} {model.absolute()} on machine {platform.node()}"


def check_device(device: str) -> None:
    """Raise CannotTrain if torch has no `device` here."""
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
    else:
        if chosen.type != "cuda" or (chosen.index or 0) < torch.cuda.device_count():
            return
        reason = f"torch finds {counted(torch.cuda.device_count(), 'GPU')} on machine {platform.node()}"
    raise CannotTrain(f"the trainer cannot use the device {device!r}: {reason}. Set trainer.device or trainer.gpus")


def check_device_memory(folder: Path, config: TrainingConfig, device: str, here: int = 1, longest: int = 0) -> None:
    """Raise ValueError if `device` has too little free memory for a rank that trains the model in `folder` on sequences
    of `longest` tokens, CannotTrain if it will never have enough, or if the model cannot be read.

    The ranks of which `here` are on this machine share its memory, which must also have what those of a GPU offload. A
    model whose config has other names is not checked.
    """
    try:
        shape = shape_of(folder)
    except UnknownSize as error:
        log.warning("the memory for the model is not checked: %s", error)
        return
    except (FileNotFoundError, ValueError) as error:
        raise CannotTrain(f"the model in {folder} cannot be read: {error}") from error
    plan, shared, memory = plan_rank(shape, config, longest), "", usable_memory()
    if torch.device(device).type == "cuda":
        _check_offloaded(here * offloaded_bytes(shape, config), memory.available, memory.total, here, config)
        available, total = torch.cuda.mem_get_info(device)
    else:
        available, total = memory.available // here, memory.total // here
        shared = f" (a share of {here})" if here > 1 else ""
    try:
        check_memory(plan, available, device + shared, config, longest)
    except ValueError as error:
        if plan.total <= total:
            raise  # another process may free the rest
        raise CannotTrain(f"{error}. It has only {size_text(total)} in all") from error


def _check_offloaded(size: int, available: int, total: int, here: int, config: TrainingConfig) -> None:
    """Raise ValueError if a machine with `available` bytes lacks memory for the `size` bytes that its `here` ranks
    offload, CannotTrain if it lacks it with all `total` bytes; warn if it does for the blocks of pinned memory.
    """
    if PINNED * size <= available:
        return
    setting = "unset trainer.learner.share_device"
    if not config.learner.share_device:
        setting = "take names out of trainer.learner.offload, or place the ranks on more machines"
    text = (
        f"{counted(here, 'rank')} of machine {platform.node()} will offload {size_text(size)}, in up to "
        f"{size_text(PINNED * size)} of pinned memory, but it has {size_text(available)} free: {setting}"
    )
    if size <= available:
        log.warning("%s", text)
    else:
        raise (ValueError if size <= total else CannotTrain)(text)
