"""report.html: the report of a run, one self-contained page."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from pipelines.inspect.audit.result import NUMBERS
from pipelines.inspect.metrics_file import read_metrics
from pipelines.inspect.run_files import AUDIT_FILE, INSIGHT_FILE, METRICS_FILE, SAMPLES_FILE
from pipelines.inspect.run_folders import config_file
from pipelines.inspect.run_state.agents import agent_rows
from pipelines.inspect.run_state.busy import busy_text
from pipelines.present.report.charts import Chart, charts, phases
from pipelines.present.report.closing import next_commands
from pipelines.present.report.page_style import head
from pipelines.present.report.samples import samples_section
from pipelines.present.report.summary import read_summary
from pipelines.present.report.verdict import RunSummary, outcome, verdicts
from pipelines.present.view.text import UNKNOWN, clock, count, figure
from schemas.records import Metric

LABELS: Mapping[str, str] = {
    "reached": "goal reached",
    "reward_first": "mean reward, first tenth",
    "reward_last": "mean reward, last tenth",
    "heldout_before": "held-out accuracy before, greedy",
    "heldout_after": "held-out accuracy after, greedy",
    "heldout_reward_before": "mean reward of greedy held-out answers before",
    "heldout_reward_after": "mean reward of greedy held-out answers after",
    "heldout_sampled_before": "held-out accuracy before, sampled",
    "heldout_sampled_after": "held-out accuracy after, sampled",
    "heldout_warm_start_best": "best supervised checkpoint, greedy",
    "heldout_questions": "held-out questions",
    "trajectories_trained": "trajectories trained",
    "optimizer_steps": "optimizer steps",
    "weight_versions": "weight versions published",
    "staleness_mean": "staleness of the run, mean",
    "staleness_max": "staleness of the run, maximum",
    "over_age": "trained above max_staleness",
    "response_length_first": "response length, first tenth",
    "response_length_last": "response length, last tenth",
    "kl_reference_first": "KL to the reference model, first tenth",
    "kl_reference_last": "KL to the reference model, last tenth",
    "kl_mismatch": "KL between the generating and the trained policy",
    "tokens_generated": "tokens generated",
    "tokens_per_s": "tokens generated per second, first step to last",
    "error_share": "share of trajectories with an error",
    "reward_errors": "reward errors",
    "episode_errors": "episode errors",
    "generation_errors": "generation errors",
    "wall_seconds": "wall time, seconds",
    "downtime_seconds": "not running before it was resumed, seconds",
    "lost": "trajectories lost",
    "trained_twice": "trajectories trained twice",
    "seed": "seed",
}


_CONFIGURATION = '<div class="card wide"><details><summary>Configuration</summary><pre>{}</pre></details></div>'


def render_report(folder: Path, metrics: Sequence[Metric] | None = None) -> str:
    """Return the page of the run in `folder`, from its summary, metrics, audit, insight, samples and configuration.

    The summary of a run that has not ended is made from its metrics; `metrics`: those of a run without a file of them.
    Raises ValueError if a file is invalid.
    """
    audit, config = folder / AUDIT_FILE, config_file(folder)
    metrics = read_metrics(folder / METRICS_FILE) if metrics is None else metrics
    insight, samples = folder / INSIGHT_FILE, folder / SAMPLES_FILE
    return page(
        read_summary(folder, metrics),
        metrics,
        json.loads(audit.read_text("utf-8")) if audit.exists() else None,
        "" if config is None else config.read_text("utf-8"),
        folder,
        json.loads(insight.read_text("utf-8")) if insight.exists() else None,
        json.loads(samples.read_text("utf-8")) if samples.exists() else [],
    )


def page(
    summary: RunSummary,
    metrics: Sequence[Metric],
    audit: Mapping[str, Any] | None,
    config: str,
    folder: Path,
    insight: Mapping[str, Any] | None = None,
    samples: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return the page. Pure; all text from the run is escaped.

    `insight` is the result of `insight.insight`, `samples` that of `samples.report_samples`.
    """
    run = escape(str(summary.get("run")))
    listed = next_commands(folder)
    width = max(len(command) for command, _ in listed)
    commands = "\n".join(f"{command:<{width}}  # {about}" for command, about in listed)
    error = summary.get("error")
    agents = _table("Agents", agent_rows(summary["agents"])) if summary.get("agents") else ""
    results = "".join(f"<p>{escape(each)}</p>" for each in verdicts(summary, folder))
    return "\n".join(
        [
            head(run),
            f'<h1>{run}</h1><p class="sub">{escape(_subtitle(summary))}</p>',
            f'<p class="bad">{escape(str(error))}</p>' if error else "",
            f'<div class="tiles">{"".join(_tiles(summary))}</div>',
            f'<h2>Results</h2><div class="card">{results}</div>',
            f'<h2>Plots</h2><div class="plots">{"".join(map(_card, charts(metrics, summary)))}</div>',
            f'<div class="wide">{_card(phases(summary.get("phases") or {}))}</div>',
            samples_section(samples),
            '<h2>Metrics</h2><div class="tables">',
            _table("Summary", _summary_rows(summary)),
            f"<div>{agents}{_episodes(summary.get('episodes'))}{_audit(audit)}{_machine(summary)}</div></div>",
            _insight(insight) if insight else "",
            f'<h2>Next commands</h2><div class="card"><pre>\n{escape(commands)}</pre></div>',
            _CONFIGURATION.format(escape(config)) if config else "",
            "</main></body></html>\n",
        ]
    )


def _summary_rows(summary: RunSummary) -> Iterable[tuple[str, str]]:
    """Yield label and text of each figure, those of a warm start or a resumption only where there was one."""
    optional = ("heldout_warm_start_best", "downtime_seconds")
    for key, label in LABELS.items():
        if key not in optional or summary.get(key) is not None:
            yield label, shown(summary.get(key))
    if busy := busy_text(summary.get("busy") or {}):
        yield "busy", busy


def _subtitle(summary: RunSummary) -> str:
    machine = summary.get("machine") or {}
    started = summary.get("started_at")
    parts = [
        outcome(summary),
        time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(started)) if started else "",
        f"{machine.get('cpu') or 'unknown processor'}, {machine['cores']} cores" if "cores" in machine else "",
        f"seed {summary['seed']}" if summary.get("seed") is not None else "",
    ]
    return " · ".join(part for part in parts if part)


def _tiles(summary: RunSummary) -> Iterable[str]:
    def change(first: str, last: str) -> str:
        return f"{figure(summary.get(first))} → {figure(summary.get(last))}"

    yield _tile(change("reward_first", "reward_last"), "training reward")
    yield _tile(change("heldout_before", "heldout_after"), "held-out accuracy, greedy")
    if (best := summary.get("heldout_warm_start_best")) is not None:
        yield _tile(figure(best), "best supervised checkpoint")
    yield _tile(
        f"{figure(summary.get('staleness_mean'))} / {shown(summary.get('staleness_max'))}",
        "staleness of the run, mean / maximum",
    )
    yield _tile(
        count(summary.get("trajectories_trained")), f"trajectories, {summary.get('optimizer_steps') or 0} steps"
    )
    yield _tile(count(summary.get("tokens_generated")), "tokens generated")
    down = summary.get("downtime_seconds")
    yield _tile(clock(summary.get("wall_seconds")), "wall time" + (f", and {clock(down)} not running" if down else ""))
    passed = summary.get("audit_passed")
    yield _tile(
        "not audited" if passed is None else "audit passed" if passed else "audit FAILED",
        f"{shown(summary.get('lost'))} lost, {shown(summary.get('trained_twice'))} trained twice",
        passed,
    )


def _tile(value: str, label: str, good: bool | None = None) -> str:
    kind = {True: ' class="good"', False: ' class="bad"', None: ""}[good]
    return f'<div class="tile"><b{kind}>{escape(value)}</b><span>{escape(label)}</span></div>'


def _card(chart: Chart) -> str:
    note = f'<p class="note">{escape(chart.note)}</p>' if chart.note else ""
    return f'<div class="card"><h3>{escape(chart.title)}</h3>{chart.svg}{note}</div>'


def _episodes(episodes: Mapping[str, Any] | None) -> str:
    if not episodes:
        return ""
    rows = [("episodes", shown(episodes["episodes"])), ("turns of an episode", f"{episodes['turns_mean']:.1f}")]
    rows += [(f"ended: {ending}", shown(count)) for ending, count in episodes["endings"].items()]
    return _table("Episodes of environments", rows)


def _audit(audit: Mapping[str, Any] | None) -> str:
    if audit is None:
        return ""
    rows = [(name.replace("_", " "), shown(audit[name])) for name in NUMBERS if name in audit]
    return _table("Audit: trajectories by outcome", rows)


def _insight(insight: Mapping[str, Any]) -> str:
    """Return placement's plans and the slowest trajectories."""
    plans = [
        (reason, ", ".join(f"{shown(number)} {what.replace('_', ' ')}" for what, number in counts.items()))
        for reason, counts in insight["plans"].items()
    ]
    slow = [
        (
            each["trajectory_id"],
            f"{each['seconds']:,.1f} s, {shown(each['completion_tokens'])} tokens, replica {each['replica']}, "
            f"version {shown(each['policy_version'])}, {each['finish_reason']}",
        )
        for each in insight["slowest"]
    ]
    tables = _table("Plans of placement", plans or [("none", "no trajectory was moved")])
    tables += _table("Slowest trajectories", slow)
    return f'<h2>From the log</h2><div class="tables">{tables}</div>'


def _machine(summary: RunSummary) -> str:
    machine, restarts = summary.get("machine") or {}, summary.get("restarts") or {}
    rows = [(f"restarts of {name}", str(number)) for name, number in restarts.items() if number]
    rows += [(name, shown(value)) for name, value in machine.items()]
    rows += [(name, str(version)) for name, version in (summary.get("packages") or {}).items()]
    return f'<div class="wide">{_table("Machine and packages", rows)}</div>' if rows else ""


def _table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    return f'<div class="card"><h3>{escape(title)}</h3><table>{lines}</table></div>'


def shown(value: Any) -> str:
    """Return a value as text for the page."""
    if value is None or isinstance(value, bool):
        return UNKNOWN if value is None else "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
