"""The code verifier: programs that pass their tests, and programs that try to appear to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from operators.score.attempt import AnswerContext, Extraction, extract_answer
from operators.score.config import RewardSpec, ScoreConfig
from operators.score.scorer import Scorer
from operators.score.verifiers import code

pytestmark = pytest.mark.usefixtures("confined")

DOUBLE = {"tests": ["assert double(2) == 4", "assert double('a') == 'aa'"]}
ECHO = {"tests": [{"input": "1 2\n", "output": "3"}, {"input": "4 5\n", "output": "9 \n"}]}


@pytest.mark.parametrize(
    ("program", "reference", "partial", "value"),
    [
        ("def double(x): return x + x", DOUBLE, False, 1.0),
        ("def double(x): return 2 * x", {"tests": "assert double(2) == 4\nassert double(3) == 6"}, False, 1.0),
        ("def double(x): return x + 2", DOUBLE, False, 0.0),
        ("def double(x): return x + 2", DOUBLE, True, 0.5),
        ("def double(x): return", DOUBLE, True, 0.0),
        ("not Python", DOUBLE, True, 0.0),
        (None, DOUBLE, True, 0.0),
        ("print('ok'); raise SystemExit(0)", DOUBLE, True, 0.0),
        ("import os; os._exit(0)", DOUBLE, True, 0.0),
        ("def double(x):\n  import os; os._exit(0)", DOUBLE, True, 0.0),
        ("def double(x):\n  raise SystemExit(0)", DOUBLE, True, 0.0),
        ("def double(x):\n  while x != 'a': pass\n  return 'aa'", DOUBLE, True, 0.0),
        ("def double(x): return x + x\nbytearray(10**9)", DOUBLE, True, 0.0),
        ("print(sum(map(int, input().split())))", ECHO, False, 1.0),
        ("print(3)", ECHO, False, 0.0),
        ("print(3)", ECHO, True, 0.5),
        ("print(sum(map(int, input().split()))); raise ValueError", ECHO, True, 0.0),
    ],
)
def test_code_counts_passed_tests(program: str | None, reference: dict[str, Any], partial: bool, value: float) -> None:
    assert code.verify(program, reference, seconds=30.0 if value else 1.0, memory_mb=256, partial=partial) == value


@pytest.mark.parametrize("reference", [{}, {"tests": []}, {"tests": [1]}, {"tests": [{"input": ""}]}])
def test_code_verify_raises_for_a_reference_without_tests(reference: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tests"):
        code.verify("pass", reference, seconds=1.0, memory_mb=256)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So:\n```python\nx = 1\n```\nor\n```py\ny = 2\n\n```", "y = 2"),
        ("```\nx = 1\n``` and ```\ny", "x = 1"),
        ("```python\nx = 1", None),
        ("x = 1", None),
    ],
)
def test_extract_answer_takes_the_last_closed_block(text: str, answer: str | None) -> None:
    assert extract_answer(text, Extraction("fenced")) == answer


def test_code_is_a_reward_by_name() -> None:
    config = ScoreConfig(
        rewards=(RewardSpec("code", options={"seconds": 5.0}),), answer="fenced", workers=1, time_limit_s=90.0
    )
    texts = ["```python\ndef double(x): return x + x\n```", "```python\nwhile True: pass\n```", "no program"]
    with Scorer(config) as scorer:
        results = scorer.judge([AnswerContext(text, 9, "Double it.", "code", json.dumps(DOUBLE)) for text in texts])
    assert [[result.value for result in row] for row in results] == [[1.0], [0.0], [0.0]]


def test_config_bounds_code_seconds_by_time_limit_s() -> None:
    with pytest.raises(ValueError, match="time_limit_s must be above the seconds of reward code, 7"):
        ScoreConfig(rewards=(RewardSpec("code", options={"seconds": 7.0}),))
    with pytest.raises(ValueError, match="code needs seconds > 0"):
        RewardSpec("code", options={"seconds": 0})
