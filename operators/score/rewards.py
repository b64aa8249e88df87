"""Rewards by name: the verifier, which parts of the attempt it gets, its options, and where it may run.

This module imports nothing heavy: verifiers import their libraries at their first call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from operators.score.attempt import AnswerContext, Attempt
from operators.score.verifiers import code, custom, reasoning, texts
from schemas.scalars import LARGEST_REWARD

Options = Mapping[str, Any]
Judge = Callable[[Attempt], "float | list[float]"]
"""Returns a number, or one for each conversation of an agent."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A named reward.

    `options` are its options with their defaults (None: required). `in_process` is whether the verifier is fast and
    safe on any text, as a function of the answer if that depends on its task; otherwise it runs in the pool.
    `accuracy`: a value of 1 means that the answer is correct.
    """

    judge: Callable[[Attempt, Options], float | list[float]]
    in_process: bool | Callable[[AnswerContext], bool]
    accuracy: bool
    options: Options = field(default_factory=dict)
    prepare: Callable[[], object] = bool
    """Imports the verifier's libraries, which may take seconds."""
    starts_processes: bool = False
    """Whether the verifier starts processes."""


REWARDS: Mapping[str, Reward] = {
    "reasoning_gym": Reward(
        lambda a, o: reasoning.verify(a.answer, a.reference, a.task),
        in_process=lambda answer: reasoning.is_safe_in_process(reasoning.library_task(answer.reference, answer.task)),
        accuracy=True,
        prepare=lambda: reasoning.is_safe_in_process(""),
    ),
    "math_verify": Reward(
        lambda a, o: texts.equals_formula(a.answer, a.accepted),
        in_process=False,
        accuracy=True,
        prepare=lambda: texts.equals_formula("1", ["1"]),
    ),
    "exact": Reward(
        lambda a, o: texts.equals_text(a.answer, a.accepted, o["ignore_case"]),
        in_process=True,
        accuracy=True,
        options={"ignore_case": False},
    ),
    "numeric": Reward(
        lambda a, o: texts.equals_number(a.answer, a.accepted, o["tolerance"]),
        in_process=True,
        accuracy=True,
        options={"tolerance": 1e-6},
    ),
    "regex": Reward(
        lambda a, o: texts.matches(a.text, o["pattern"]),
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
        starts_processes=True,
    ),
    "environment": Reward(
        lambda a, o: _environment_reward(a),
        in_process=True,
        accuracy=True,
    ),
    "format": Reward(
        lambda a, o: texts.has_tags(a.text, o["tags"]),
        in_process=True,
        accuracy=False,
        options={"tags": ("think", "answer")},
    ),
    "length": Reward(
        lambda a, o: texts.brevity(a.tokens, o["target"], o["limit"]),
        in_process=True,
        accuracy=False,
        options={"target": None, "limit": None},
    ),
    "overlong": Reward(
        lambda a, o: texts.soft_overlong(a.tokens, o["limit"], o["buffer"]),
        in_process=True,
        accuracy=False,
        options={"limit": None, "buffer": None},
    ),
}


def _environment_reward(attempt: Attempt) -> float | list[float]:
    if attempt.environment is None:
        raise ValueError("the prompt has no environment: set prompts.environment")
    return list(attempt.reported) or attempt.environment


def is_custom(name: str) -> bool:
    """Whether `name` is a user's function, `module:function`, and not one of `REWARDS`."""
    return ":" in name


def make_judge(name: str, options: Options) -> Judge:
    """The function that judges attempts by reward `name`; imports its libraries, or the user's module.

    A judge raises whatever its verifier raises, and TypeError or ValueError if the result is not a number of at most
    `LARGEST_REWARD`, nor one for each conversation.
    """
    if is_custom(name):
        function = custom.load(name, options)
        return lambda attempt: judgement(
            function(**{field: getattr(attempt, field) for field in custom.ARGUMENTS}), len(attempt.messages)
        )
    reward = REWARDS[name]
    reward.prepare()
    filled = {**reward.options, **options}
    return lambda attempt: judgement(reward.judge(attempt, filled), len(attempt.messages))


def judgement(value: Any, conversations: int) -> float | list[float]:
    """`value` as a finite float, or as one for each of the `conversations` of an agent. Raises as `finite` does."""
    if not isinstance(value, list | tuple):
        return finite(value)
    if len(value) != conversations:
        raise ValueError(
            f"returned {len(value)} numbers for {conversations} conversations: return one, or one for each"
        )
    if not value:
        raise ValueError("returned no number: only an agent's episode has conversations")
    return [finite(each) for each in value]


def finite(value: Any) -> float:
    """`value` as a float of at most `LARGEST_REWARD`. Raises TypeError if it is not a number, else ValueError."""
    if not hasattr(value, "__float__"):
        raise TypeError(f"returned {type(value).__name__} instead of a number")
    number = float(value)
    if not abs(number) <= LARGEST_REWARD:
        raise ValueError(f"returned {number}: a reward is a finite number of at most {LARGEST_REWARD:g}")
    return number
