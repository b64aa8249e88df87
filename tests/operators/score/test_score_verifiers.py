"""Verifiers and answer extraction, as tables of cases."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from operators.score.attempt import Attempt, Extraction, extract_answer
from operators.score.verifiers import reasoning, texts


@pytest.mark.parametrize(
    ("extraction", "text", "answer"),
    [
        (Extraction("marker", "#"), "4-1=3;3-7=-4;#-4", "-4"),
        (Extraction("marker", "#"), "#1 no, # 2 \n", "2"),
        (Extraction("marker", "#"), "-4", None),
        (Extraction("marker", "####"), "a # b #### 72", "72"),
        (Extraction("marker", "#"), "#", ""),
        (Extraction("regex", r"answer is (\d+)"), "the answer is 3, no, the answer is 4.", "4"),
        (Extraction("regex", r"\d+"), "3 then 4", "4"),
        (Extraction("regex", r"(x)?\d"), "3", None),
        (Extraction("regex", r"\d+"), "none", None),
        (Extraction("boxed"), r"so \boxed{\frac{1}{2}} and \boxed{ \frac{3}{4} }.", r"\frac{3}{4}"),
        (Extraction("boxed"), r"\fbox{7} then \boxed{8", "7"),
        (Extraction("boxed"), r"} {\boxed{a} }", "a"),
        (Extraction("boxed"), "{4}", None),
        (Extraction("whole"), "  4\n", "4"),
    ],
)
def test_extract_answer_by_kind(extraction: Extraction, text: str, answer: str | None) -> None:
    assert extract_answer(text, extraction) == answer


@pytest.mark.parametrize(
    ("answer", "accepted", "value"),
    [("a  b", ["a b"], 1), ("A b", ["a b"], 0), ("c", ["a", "c"], 1), ("12", ["1"], 0), (None, ["None"], 0)],
)
def test_exact_compares_up_to_white_space(answer: str | None, accepted: list[str], value: float) -> None:
    assert texts.equals_text(answer, accepted) == value


def test_exact_ignores_case_on_request() -> None:
    assert texts.equals_text("PARIS", ["Paris"], ignore_case=True) == 1


@pytest.mark.parametrize(
    ("answer", "accepted", "value"),
    [
        ("4", "4.0", 1),
        ("1,024", "1024", 1),
        ("$ 3.50", "3.5", 1),
        ("3/8", "0.375", 1),
        ("37.5%", "3/8", 1),
        ("−4.", "-4", 1),
        ("1000000.5", "1000001", 1),
        ("4.001", "4", 0),
        ("1/0", "4", 0),
        ("four", "4", 0),
        ("nan", "4", 0),
        ("1e999", "4", 0),
        ("", "0", 0),
        (None, "0", 0),
    ],
)
def test_numeric_accepts_any_notation(answer: str | None, accepted: str, value: float) -> None:
    assert texts.equals_number(answer, [accepted]) == value


def test_numeric_raises_for_a_reference_without_a_number() -> None:
    with pytest.raises(ValueError, match="'Paris' is not a number"):
        texts.equals_number("4", ["Paris"])
    assert texts.equals_number("4", ["four", "4"]) == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>hm</think>\n<answer>4</answer>\n", 1),
        ("<think></think><answer></answer>", 1),
        ("<answer>4</answer><think>hm</think>", 0),
        ("<think>hm</think> well <answer>4</answer>", 0),
        ("<think>hm</think><answer>4</answer> done", 0),
        ("<think>hm<answer>4</answer></think>", 0),
        ("<think>a</think><think>b</think><answer>4</answer>", 0),
        ("<think>hm<answer>4</answer>", 0),
        ("4", 0),
    ],
)
def test_format_requires_tags_in_order(text: str, value: float) -> None:
    assert texts.has_tags(text) == value


def test_regex_dot_matches_newlines() -> None:
    assert texts.matches("a\nb", "a.b") == 1
    assert texts.matches("a\nc", "a.b") == 0


@pytest.mark.parametrize(("tokens", "value"), [(0, 1), (100, 1), (150, 0.5), (200, 0), (900, 0)])
def test_brevity_is_linear_between_target_and_limit(tokens: int, value: float) -> None:
    assert texts.brevity(tokens, target=100, limit=200) == value


@pytest.mark.parametrize(("tokens", "value"), [(0, 0), (160, 0), (170, -0.25), (200, -1), (900, -1)])
def test_soft_overlong_is_linear_within_the_buffer(tokens: int, value: float) -> None:
    assert texts.soft_overlong(tokens, limit=200, buffer=40) == value


@pytest.mark.parametrize(
    ("answer", "accepted", "value"),
    [
        (r"\frac{1}{2}", "0.5", 1),
        ("1/2", r"\frac{2}{4}", 1),
        (r"\frac{1}{3}", "0.5", 0),
        (r"\sqrt{8}", r"2\sqrt{2}", 1),
        ("", "1", 0),
        (None, "1", 0),
    ],
)
def test_math_verify_compares_expressions(answer: str | None, accepted: str, value: float) -> None:
    assert texts.equals_formula(answer, [accepted]) == value


def entry(task: str, **args: Any) -> dict[str, Any]:
    """An entry as it arrives in a record, decoded from JSON."""
    library = pytest.importorskip("reasoning_gym.factory")
    made = library.create_dataset(task, seed=3, **args)[0]
    return json.loads(json.dumps({**made, "task_args": args}))


@pytest.mark.parametrize(
    ("task", "args"),
    [
        ("chain_sum", {"min_terms": 3, "max_terms": 5, "min_digits": 1, "max_digits": 1}),
        ("gcd", {"max_value": 50}),
        ("prime_factorization", {}),
        ("polynomial_equations", {}),
        ("time_intervals", {"max_date_difference_days": 9}),
        ("lcm", {}),
    ],
)
def test_reasoning_gym_accepts_only_the_answer_of_the_entry(task: str, args: dict[str, Any]) -> None:
    known = entry(task, **args)
    assert reasoning.verify(known["answer"], known, task) == 1.0
    assert reasoning.verify("4242", known, task) < 0.1
    assert reasoning.verify(None, known, task) < 0.1


def test_reasoning_gym_scores_with_the_arguments_of_the_task() -> None:
    """The credit for a wrong date depends on an argument, so the entry carries the arguments."""
    args = {"task_types": ["date"], "max_date_difference_days": 10}
    known = entry("time_intervals", **args)
    days = int(known["answer"].split()[0]) + 5
    assert reasoning.verify(f"{days} days", known, "time_intervals") == 0.5


def test_reasoning_gym_gives_partial_credit() -> None:
    known = {"answer": "7", "metadata": {}}
    assert reasoning.verify("17", known, "gcd") == 0.5


def test_answer_that_fails_a_reasoning_gym_verifier_is_wrong() -> None:
    """Else such an answer would not be trained, and never be unlearned."""
    assert reasoning.verify("two × three", entry("prime_factorization"), "prime_factorization") == 0.0
    assert reasoning.verify("1", entry("boxnet"), "boxnet") == 0.0


def test_reasoning_gym_raises_for_unknown_tasks_and_bad_entries() -> None:
    with pytest.raises(ValueError, match="no task 'no_such'"):
        reasoning.verify("1", {"answer": "1", "metadata": {}}, "no_such")
    with pytest.raises(ValueError, match="not an entry of a reasoning-gym task"):
        reasoning.verify("1", {"answer": "1"}, "gcd")


def test_tasks_that_run_or_parse_answers_are_not_safe_in_process() -> None:
    assert all(map(reasoning.is_safe_in_process, ("chain_sum", "gcd", "lcm", "basic_arithmetic")))
    assert not any(
        map(reasoning.is_safe_in_process, ("spiral_matrix", "binary_matrix", "countdown", "prime_factorization"))
    )


HOSTILE = [
    "1e999999999",
    "9" * 20_000,
    "1/" * 5_000 + "1",
    r"\boxed{" * 5_000,
    "#" * 20_000,
    "{" * 20_000 + "}" * 20_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_in_process_verifiers_are_fast_on_hostile_text(text: str) -> None:
    known = entry("chain_sum")
    start = time.thread_time()
    for extraction in (Extraction("marker", "#"), Extraction("boxed"), Extraction("whole")):
        extract_answer(text, extraction)
    for task in ("chain_sum", "decimal_chain_sum", "gcd"):
        reasoning.verify(text, known, task)
    texts.equals_text(text, ["1"])
    texts.equals_number(text, ["1"])
    texts.has_tags("<think>" + text)
    assert time.thread_time() - start < 1.0


def test_attempt_lists_the_accepted_answers() -> None:
    def accepted(reference: dict[str, Any]) -> list[str]:
        return Attempt("", None, 0, "", "", reference).accepted

    assert accepted({"answer": 4}) == ["4"]
    assert accepted({"answer": ["a", "b"]}) == ["a", "b"]
    for reference in ({}, {"answer": None}, {"answer": []}):
        with pytest.raises(ValueError, match="no answer"):
            accepted(reference)
