"""Rejects a model that does not fit into a rank's memory before anything is loaded."""

from __future__ import annotations

import logging
from pathlib import Path

import psutil
import torch

from operators.trainer.memory_plan import check_memory, plan_memory, shape_of
from operators.trainer.training_config import TrainingConfig

log = logging.getLogger(__name__)


def check_device_memory(folder: Path, config: TrainingConfig, device: str) -> None:
    """Raise ValueError if `device` has too little free memory for one of the ranks that train the model in `folder`.

    The ranks of a CPU run share their machine's memory. A model whose config has other names is not checked.
    """
    ranks = config.ranks
    try:
        plan = plan_memory(shape_of(folder), config.ranks_of_a_copy, config.learner)
    except KeyError as error:
        log.warning("the memory for the model in %s is not checked: its config.json has no %s", folder, error)
        return
    if torch.device(device).type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
    else:
        available = psutil.virtual_memory().available // ranks
    shared = f" (a share of {ranks})" if ranks > 1 and device == "cpu" else ""
    check_memory(plan, available, device + shared, ranks)
