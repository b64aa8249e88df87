"""The HTML report: it is well-formed, self-contained, escaped, and shows the run's metrics."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import START, evaluation_metric, history, trainer_metric

from pipelines.inspect.audit.result import Audit
from pipelines.inspect.metrics_file import MetricsFile
from pipelines.inspect.run_files import METRICS_FILE
from pipelines.inspect.run_state.agents import agents_of
from pipelines.present.plots import (
    MAX_POINTS,
    Axis,
    Level,
    Line,
    bar_plot,
    heat_map,
    line_plot,
    smoothed,
    thinned,
    ticks,
    timeline,
)
from pipelines.present.report.charts import charts
from pipelines.present.report.comparison import ComparedRun, comparison, metric_rows
from pipelines.present.report.html import page, render_report
from pipelines.present.report.insight import plans_of, slowest
from pipelines.present.report.summary import RunFacts, summarise, summary_of
from schemas.plain import encode_json
from schemas.records import Metric

SAMPLES = [
    {
        "place": "first", "prompt": "p3", "task": "<sums>", "reward": 0.5, "question": "1 < 2?", "reference": "<yes>",
        "samples": [
            {"trajectory": "p3.0", "version": "1.0", "reward": 1.0, "tokens": 3,
             "pieces": [["<b>", -0.01], ["no", -9.0], ["x\x1b", None], ["y", float("nan")]]},
        ],
    },
]  # fmt: skip
AUDIT = Audit(
    dispatched=10_800,
    trained=10_240,
    evaluated=512,
    in_flight={"generation": 40, "score": 8},
    trained_twice=("p1.0",),
).to_json()  # fmt: skip
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Checker(HTMLParser):
    """Collects tags, attributes and text; raises if tags do not nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> without an open tag"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def checked(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    return checker


def folder_of_a_run(folder: Path, run: str = "sums") -> Path:
    with MetricsFile(folder / "metrics.jsonl") as file:
        file.append(history())
    (folder / "audit.json").write_text(json.dumps(AUDIT))
    (folder / "config.toml").write_text("[run]\nseed = 3\n[trainer]\nlr = 2e-4\n")
    state = {"run": run, "started_at": START / 1000, "ended_at": START / 1000 + 131, "error": None}
    (folder / "state.json").write_text(json.dumps(state))
    audit = {"passed": False, "lost": 0, "trained_twice": 1}
    summary = summarise(folder, audit, {"warm start": 12.0, "training": 96.0, "broker": 0.0})
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_report_shows_run(tmp_path: Path) -> None:
    found = checked(render_report(folder_of_a_run(tmp_path)))
    text = " ".join(found.text)
    for expected in (
        "sums", "reached its goal", "0.42 → 0.89", "0.24 → 0.86", "best supervised checkpoint, greedy: 0.94",
        "below the best supervised checkpoint (0.94)", "audit FAILED", "0 lost, 1 trained twice",
        "10,800", "warm start 0:12", "training 1:36", "lr = 2e-4", f"laminar runs audit --run {tmp_path}",
        "2:11", "seed 3",
    ):  # fmt: skip
        assert expected in text, expected
    assert "broker 0:00" not in text
    assert found.tags.count("svg") == 11  # ten plots and the phases
    assert "no data" not in text
    assert "48" in found.text  # in flight, the stages summed


def test_report_is_self_contained(tmp_path: Path) -> None:
    html = render_report(folder_of_a_run(tmp_path))
    found = checked(html)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", html)
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(found.tags)
    assert not {"src", "href", "onload", "onclick"} & {name for name, _ in found.attributes}


UNSAFE = "<script>alert('x')</script>&\"'"


def test_report_escapes_text_from_run() -> None:
    metrics = [
        *history(3),
        Metric("lag", 0, {UNSAFE: 3.0}, START + 1),
        Metric("lag", 0, {UNSAFE: 5.0}, START + 2),
    ]
    facts = RunFacts(UNSAFE, error=UNSAFE, phases={UNSAFE: 4.0}, machine={UNSAFE: UNSAFE, "cores": 2, "cpu": UNSAFE})
    restarts = {UNSAFE: 1}
    summary = {**summary_of(metrics, facts), "restarts": restarts, "packages": {UNSAFE: UNSAFE}}
    html = page(summary, metrics, {"dispatched": UNSAFE, "lost": [UNSAFE]}, UNSAFE, Path(UNSAFE))
    found = checked(html)
    assert "script" not in found.tags
    assert "<script>" not in html
    assert {name for name, _ in found.attributes if name.startswith("on")} == set()
    assert sum(UNSAFE in text for text in found.text) >= 8


def test_report_of_unknown_run() -> None:
    html = page(summary_of([], RunFacts("empty")), [], None, "", Path("runs/empty"))
    text = " ".join(checked(html).text)
    assert text.count("no data") == 11
    assert "No trajectory was trained." in text
    assert "not audited" in text
    assert "None" not in text


def test_report_of_a_run_that_has_not_ended_shows_what_there_is(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_bytes(b"".join(encode_json(metric) + b"\n" for metric in history()))
    text = " ".join(checked(render_report(tmp_path)).text)
    assert "0.42 → 0.89" in text
    assert "reached its goal" not in text


def test_charts_are_well_formed_and_within_bounds() -> None:
    metrics = list(history())
    shown = charts(metrics, summary_of(metrics, RunFacts("r")))
    assert len({chart.title for chart in shown}) == len(shown)
    for chart in shown:
        svg = ElementTree.fromstring(chart.svg.partition("</svg>")[0] + "</svg>")
        for line in svg.iter("polyline"):
            for point in line.attrib["points"].split():
                x, y = map(float, point.split(","))
                assert 0 <= x <= 560, chart.title
                assert 0 <= y <= 250, chart.title


def test_line_plot_axis_directions() -> None:
    svg = line_plot("t", [Line("up", [(0, 0.0), (1, 1.0)])], Axis("x"), Axis("y"), [Level("<top>", 1.0)])
    root = ElementTree.fromstring(svg.partition("</svg>")[0] + "</svg>")
    line = root.find("polyline")
    level = root.find("line[@class='level']")
    assert line is not None
    assert level is not None
    (x0, y0), (x1, y1) = (tuple(map(float, point.split(","))) for point in line.attrib["points"].split())
    assert x0 < x1
    assert y0 > y1  # SVG counts from above
    assert float(level.attrib["y1"]) == y1
    assert "&lt;top&gt;" in svg


@pytest.mark.parametrize(
    "points",
    [[(0.0, 0.0)], [(5.0, 0.3), (5.0, 0.3)], [(0.0, 1e-9), (1.0, 2e-9)], [(0.0, -5.0), (1.0, -5.0)], [(0.0, 1e12)]],
)
def test_line_plot_accepts_degenerate_data(points: list[tuple[float, float]]) -> None:
    svg = line_plot("t", [Line("a", points)], Axis("x"), Axis("y"))
    ElementTree.fromstring(svg.partition("</svg>")[0] + "</svg>")
    assert "nan" not in svg
    assert "inf" not in svg


def test_axis_bound_widens_for_larger_values() -> None:
    svg = line_plot("t", [Line("a", [(0.0, 0.5), (1.0, 3.0)])], Axis("x"), Axis("y", low=0, high=1))
    assert ">3<" in svg


def test_bar_plot_heights_are_proportional() -> None:
    svg = bar_plot("t", {"0": 10.0, "1": 30.0, "2": 0.0}, Axis("x"), Axis("y", low=0))
    heights = [float(height) for height in re.findall(r'<rect[^>]* height="([\d.]+)"', svg)]
    assert heights[1] == pytest.approx(3 * heights[0], abs=0.3)
    assert heights[2] == 0
    assert "25 %" in svg
    assert "75 %" in svg
    assert "no data" in bar_plot("t", {}, Axis("x"), Axis("y"))


def test_timeline_widths_are_proportional() -> None:
    svg = timeline("t", [("a", 30.0), ("b", 10.0)], str)
    first, second = (float(width) for width in re.findall(r'width="([\d.]+)"', svg))
    assert first + 1.5 == pytest.approx(3 * (second + 1.5), abs=0.3)
    assert "no data" in timeline("t", [], str)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 10_240, [0, 2000, 4000, 6000, 8000, 10_000]),
        (0.13, 0.17, [0.13, 0.14, 0.15, 0.16, 0.17]),
        (3, 3, [3]),
        (-4, 4, [-4, -2, 0, 2, 4]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_thinned_keeps_mean_of_long_series() -> None:
    points = [(float(x), float(x % 7)) for x in range(14_000)]
    thin = thinned(points)
    assert len(thin) <= MAX_POINTS
    assert sum(y for _, y in thin) / len(thin) == pytest.approx(3.0, abs=0.05)
    assert thinned(list(reversed(points[:5]))) == points[:5]


def test_smoothed_averages_neighbours() -> None:
    assert smoothed([(0, 0.0), (1, 3.0), (2, 6.0), (3, 0.0)], 3) == [(0, 1.5), (1, 3.0), (2, 3.0), (3, 3.0)]


def values_drawn(metrics: list[Metric], title: str) -> Any:
    chart = next(each for each in charts(metrics, {}) if each.title == title)
    return chart.svg


def test_generation_rate_ignores_replica_restart() -> None:
    heartbeats = [
        Metric("replica", 0, {"incarnation": incarnation, "tokens_generated": tokens}, START + at)
        for incarnation, at, tokens in ((1, 0, 0), (1, 1000, 500), (2, 9000, 0), (2, 10_000, 500))
    ]
    svg = values_drawn(heartbeats, "Tokens generated per second")
    points = re.findall(r'points="([^"]*)"', svg)[0].split()
    assert len(points) == 2  # one rate of each start, and none across the two
    assert len({point.split(",")[1] for point in points}) == 1


def test_replica_chart_is_heat_map_for_many_replicas() -> None:
    heartbeats = [
        Metric("replica", replica, {"kv_used": 10.0 * replica, "kv_capacity": 150.0, "capacity": 1.0}, START + at)
        for replica in range(16)
        for at in range(0, 10_000, 500)
    ]
    svg = values_drawn(heartbeats, "KV cache in use")
    rows: dict[str, list[float]] = {}
    for top, shade in re.findall(r'<rect [^>]*y="([^"]*)"[^>]*fill-opacity="([^"]*)"', svg):
        rows.setdefault(top, []).append(float(shade))
    assert len(rows) == 15  # a replica without KV use is blank
    assert [row[0] for row in rows.values()] == sorted(row[0] for row in rows.values())
    assert max(map(max, rows.values())) == 1.0
    assert [f">{replica}</text>" in svg for replica in (0, 15)] == [True, True]


def test_heat_map_without_data() -> None:
    axis = Axis("share")
    assert "no data" in heat_map("KV", {}, axis, axis)
    assert "no data" in heat_map("KV", {"0": []}, axis, axis)
    assert "<rect" in heat_map("KV", {"0": [(3.0, 0.0)], "1": [(3.0, 2.0)]}, axis, axis)


def test_divergence_chart_needs_measured_values() -> None:
    assert all(chart.title != "Policy: divergence and entropy" for chart in charts([trainer_metric(1)], {}))
    metric = Metric("trainer", 1, {"kl/mismatch": 0.01}, START)
    assert "no data" not in values_drawn([metric], "Policy: divergence and entropy")


def test_held_out_chart_shows_single_evaluation_as_dot() -> None:
    assert "<circle" in values_drawn([evaluation_metric(0, "greedy", 0.3)], "Accuracy on held-out questions")


def test_report_shows_plans_and_slowest_trajectories() -> None:
    rows = [{"reason": "repack", "moves": [{"trajectory_ids": ["p1.0", "p1.1"], "kv_tokens": 30}]}] * 2
    plans = plans_of(rows)
    assert plans == {"repack": {"plans": 2, "moves": 2, "trajectories": 4, "kv_tokens": 60}}
    trajectories = [
        {
            "trajectory_id": f"p{number}.0",
            "replica": 0,
            "policy_version": 3,
            "completion_tokens": 9,
            "finish_reason": "stop",
            "started_at": datetime.fromtimestamp(0, UTC),
            "finished_at": datetime.fromtimestamp(number, UTC),
        }
        for number in range(30)
    ]
    slow = slowest(iter(trajectories))
    assert [each["seconds"] for each in slow] == [29, 28, 27, 26, 25, 24, 23, 22, 21, 20]
    html = page(summary_of([], RunFacts("r")), [], None, "", Path("runs/r"), {"plans": plans, "slowest": slow})
    text = "".join(checked(html).text)
    assert "2 plans, 2 moves, 4 trajectories, 60 kv tokens" in text
    assert "29.0 s, 9 tokens, replica 0, version 3, stop" in text


def test_comparison_shows_all_runs() -> None:
    metrics = list(history())
    summary = summary_of(metrics, RunFacts("r"))
    runs = [
        ComparedRun("first", summary, metrics),
        ComparedRun("<second>", {**summary, "reward_last": None}, metrics[:40]),
    ]
    html = comparison(runs)
    text = "".join(checked(html).text)
    assert "<second>" not in html
    assert html.count("<svg") == 6
    assert "first" in text
    row = next(row for row in metric_rows(runs) if row["metric"] == "mean reward, last tenth")
    assert row["first"] == summary["reward_last"]
    assert row["<second>"] is None


def test_reports_have_content_security_policy(tmp_path: Path) -> None:
    for html in (
        render_report(folder_of_a_run(tmp_path)),
        comparison([ComparedRun("a", {}, []), ComparedRun("b", {}, [])]),
    ):
        head, _, _ = html.partition("<title>")
        # The policy must come before anything that could be loaded.
        assert "Content-Security-Policy\" content=\"default-src 'none'; " in head
        assert "script-src" not in head
        assert "<script" not in html


def test_page_shows_the_components_of_several_rewards() -> None:
    (group, *_), parts = SAMPLES, (("environment", 1.0, 1.0), ("turns", -1.0, 0.05))
    components = [{"name": name, "value": value, "weight": weight} for name, value, weight in parts]
    rewarded = {**group, "samples": [{**group["samples"][0], "reward": 0.95, "components": components}]}
    text = "".join(checked(page({"run": "sums"}, [], None, "", Path("runs/sums"), None, [rewarded])).text)
    assert "reward 0.95 (environment 1.00, turns -1.00) · " in text


def test_page_shows_samples_with_coloured_tokens() -> None:
    checker = checked(page({"run": "sums"}, [], None, "", Path("runs/sums"), None, SAMPLES))
    text = "".join(checker.text)
    assert "first: p3, <sums>, mean reward 0.50" in text
    assert "best supervised" not in text  # there was no warm start
    assert "reference: <yes>" in text
    assert "<b>nox\\x1by" in text
    classes = [value for name, value in checker.attributes if name == "class"]
    assert [name for name in classes if name in ("p0", "p5")] == ["p0", "p5", "p5", "p0", "p5"]  # two are the legend's
    assert "<h2>Samples" not in page({"run": "sums"}, [], None, "", Path("runs/sums"))


def test_report_shows_where_the_time_of_agents_went(tmp_path: Path) -> None:
    totals = {"episodes": 2.0, "turns": 6.0, "conversations": 4.0, "model_s": 6.0, "agent_s": 3.0, "waiting_s": 1.0}
    metrics = [Metric("agents", process, totals, 5) for process in (0, 1)]
    metrics.append(Metric("agents", 0, {"episodes": 1.0}, 4))  # earlier
    found = agents_of(metrics)
    assert found is not None
    assert found["episodes"] == 4
    text = page({"run": "sums", "agents": found}, [], None, "", tmp_path)
    for label, value in (
        ("turns of an episode", "3.0"),
        ("in requests to the model", "3.00 s (60 %)"),
        ("between requests: tools and the agent", "1.50 s (30 %)"),
        ("before the first request", "0.50 s (10 %)"),
    ):
        assert f"<td>{label}</td><td>{value}</td>" in text
    assert "Agents" not in page({"run": "sums"}, [], None, "", tmp_path)
    assert agents_of([]) is None
