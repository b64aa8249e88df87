"""evaluation: versions and answers in, rounds out; opened and closed rounds in, prompts and metrics out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from record_factories import experience, manifest, prompt, trajectory, version
from role_graph import RoleGraph

from operators.evaluation.report_rounds import ClosedRound, OpenedRound
from schemas.topics import EVAL_PROMPTS, EXPERIENCES, METRICS, RELAY, SETTLED

Graph = Callable[..., RoleGraph]
QUESTION = prompt(0, 1, purpose="evaluation")


def answer(number: int, name: str) -> Any:
    asked = prompt(number, 1, purpose="evaluation", policy_version=version(0), round=name)
    return EXPERIENCES, experience(trajectory(asked, 0))


def rounds(graph: RoleGraph) -> list[Any]:
    polls = [(RELAY, manifest(version(0)))], [answer(0, "1.0/greedy"), answer(0, "1.0/greedy"), answer(9, "1.0/greedy")]
    return graph.fold("evaluate versions", *polls, questions=lambda: [QUESTION])


def test_evaluate_versions_opens_and_closes_a_round(graph: Graph) -> None:
    greedy, sampled, closed = rounds(graph("evaluation"))
    assert [(each.name, each.first) for each in (greedy, sampled)] == [("1.0/greedy", 0), ("1.0/sampled", 1)]
    assert isinstance(closed, ClosedRound)
    assert (closed.name, len(closed.answers)) == ("1.0/greedy", 1)


def test_publish_questions_writes_the_prompts_of_a_round(graph: Graph) -> None:
    opened = OpenedRound("1.0/greedy", version(0), "greedy", 7, [QUESTION])
    (asked,) = graph("evaluation").map("publish questions", opened)
    assert (asked.topic, asked.key, asked.record.round) == (EVAL_PROMPTS, "e7", "1.0/greedy")


def test_report_rounds_settles_the_answers_of_a_round(graph: Graph) -> None:
    *_, closed = rounds(graph("evaluation"))
    settled, metric = graph("evaluation").map("report rounds", closed)
    assert (settled.topic, settled.record.trajectory_id, settled.record.outcome) == (SETTLED, "e0.0", "evaluated")
    assert (metric.topic, metric.record.name) == (METRICS, "evaluation")
