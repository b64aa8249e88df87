"""Rewards by name: which verifier judges what of an attempt, with which options, and where it may run.

Imports nothing heavy: verifiers fetch their libraries when first called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from operators.score.attempt import AnswerContext, Attempt
from operators.score.verifiers import code, custom, exact, format, length, math_answer, numeric, reasoning, regex

Options = Mapping[str, Any]
Judge = Callable[[Attempt], float]


@dataclass(frozen=True, slots=True)
class Reward:
    """A named reward.

    `options` are its options with their defaults (None: must be given). `in_process` says whether the verifier is quick
    and harmless whatever a model writes, of an answer where that depends on its task; what is not runs in the pool.
    `accuracy`: a value of 1 means the right answer.
    """

    judge: Callable[[Attempt, Options], float]
    in_process: bool | Callable[[AnswerContext], bool]
    accuracy: bool
    options: Options = field(default_factory=dict)
    prepare: Callable[[], object] = bool
    """Fetches the verifier's libraries, which may take seconds."""
    processes: bool = False
    """Whether it starts processes of its own."""


REWARDS: Mapping[str, Reward] = {
    "reasoning_gym": Reward(
        lambda a, o: reasoning.verify(a.answer, a.reference, a.task),
        in_process=lambda answer: reasoning.harmless(reasoning.named_in(answer.reference, answer.task)),
        accuracy=True,
        prepare=lambda: reasoning.harmless(""),
    ),
    "math_verify": Reward(
        lambda a, o: math_answer.verify(a.answer, a.accepted),
        in_process=False,
        accuracy=True,
        prepare=lambda: math_answer.verify("1", ["1"]),
    ),
    "exact": Reward(
        lambda a, o: exact.verify(a.answer, a.accepted, o["ignore_case"]),
        in_process=True,
        accuracy=True,
        options={"ignore_case": False},
    ),
    "numeric": Reward(
        lambda a, o: numeric.verify(a.answer, a.accepted, o["tolerance"]),
        in_process=True,
        accuracy=True,
        options={"tolerance": 1e-6},
    ),
    "regex": Reward(
        lambda a, o: regex.verify(a.text, o["pattern"]),
        in_process=False,
        accuracy=False,
        options={"pattern": None},
    ),
    "code": Reward(
        lambda a, o: code.verify(a.answer, a.reference, o["seconds"], o["memory_mb"], o["partial"]),
        in_process=False,
        accuracy=True,
        options={"seconds": 4.0, "memory_mb": 512, "partial": False},
        prepare=code.prepare,
        processes=True,
    ),
    "environment": Reward(
        lambda a, o: _of_environment(a.environment),
        in_process=True,
        accuracy=True,
    ),
    "format": Reward(
        lambda a, o: format.verify(a.text, o["tags"]),
        in_process=True,
        accuracy=False,
        options={"tags": ("think", "answer")},
    ),
    "length": Reward(
        lambda a, o: length.brevity(a.tokens, o["target"], o["limit"]),
        in_process=True,
        accuracy=False,
        options={"target": None, "limit": None},
    ),
    "overlong": Reward(
        lambda a, o: length.soft_overlong(a.tokens, o["limit"], o["buffer"]),
        in_process=True,
        accuracy=False,
        options={"limit": None, "buffer": None},
    ),
}


def _of_environment(given: float | None) -> float:
    if given is None:
        raise ValueError("no environment took part: set prompts.environment")
    return given


def is_custom(name: str) -> bool:
    """Whether `name` is a user's function, `module:function`, rather than one of `REWARDS`."""
    return ":" in name


def make_judge(name: str, options: Options) -> Judge:
    """The function that judges attempts by reward `name`. Its libraries, or the user's module, are imported here.

    A judge raises whatever its verifier raises, and TypeError or ValueError where it gives no finite number.
    """
    if is_custom(name):
        function, taken = custom.load(name, options)
        return lambda attempt: finite(function(**{field: getattr(attempt, field) for field in taken}, **options))
    reward = REWARDS[name]
    reward.prepare()
    filled = {**reward.options, **options}
    return lambda attempt: finite(reward.judge(attempt, filled))


def finite(value: Any) -> float:
    """`value` as a finite float. Raises TypeError for what is no number, ValueError for NaN and infinities."""
    if not hasattr(value, "__float__"):
        raise TypeError(f"gave {type(value).__name__} instead of a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"gave {number}")
    return number
