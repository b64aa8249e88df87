"""What a summary has of the metric `score`: errors by task, and episodes of environments."""

from __future__ import annotations

import re
from pathlib import Path

from synthetic_run import START, history

from pipelines.present.report.closing import closing_lines
from pipelines.present.report.html import page
from pipelines.present.report.summary import RunFacts, summary_of
from schemas.metric_labels import labelled
from schemas.records import Metric

FACTS = RunFacts("sums")


def test_summary_has_turns_and_endings_of_episodes() -> None:
    endings = {labelled("episode_endings", ending=ending): count for ending, count in (("turns", 10.0), ("done", 30.0))}
    score = Metric("score", 40, {"trajectories": 40.0, "episodes": 40.0, "episode_turns": 150.0, **endings}, START)
    summary = summary_of([score], FACTS)
    assert summary["episodes"] == {"episodes": 40, "turns_mean": 3.75, "endings": {"done": 30, "turns": 10}}
    text = closing_lines(Path("runs/sums"), summary)
    assert re.search(r"\n  turns +3\.75   mean of 40 episodes; ended: done 30, turns 10\n", text)
    assert "<td>turns of an episode</td><td>3.8</td>" in page(summary, [], None, "", Path("runs/sums"))
    assert summary_of(list(history()), FACTS)["episodes"] is None


def test_summary_lists_a_task_that_only_failed() -> None:
    tasks = {"sums": (104.0, 0.0), "guess": (88.0, 88.0)}
    values = {"trajectories": 192.0, "episode_errors": 88.0}
    for task, (scored, errors) in tasks.items():
        values |= {labelled("trajectories", task=task): scored, labelled("errors", task=task): errors}
    values[labelled("first_error", task="guess", text="KeyError: 'target' (env.py:9)")] = 1.0
    trained = Metric("experience", 1, {labelled("trajectories", task="sums"): 32.0}, START)
    summary = summary_of([trained, Metric("score", 192, values, START)], FACTS)
    assert list(summary["tasks"]) == ["sums", "guess"]
    assert summary["tasks"]["guess"]["trajectories_trained"] == 0
    text = closing_lines(Path("runs/sums"), summary)
    assert re.search(r"\n  guess\n +trained +0   no trajectory of this task\n", text)
    assert "(episodes 88), task guess 88 of 88: KeyError: 'target' (env.py:9). `" in text
