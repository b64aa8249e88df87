"""The plot of README's result: held-out accuracy and training reward of a run over its weight versions, as an SVG file.

    make run
    python -m benchmarks.result_plot runs/latest docs/result.svg

It is drawn as the charts of the run's report, with colours and legend inside, so that it stands alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pipelines.inspect.metrics_file import read_metrics
from pipelines.inspect.run_files import METRICS_FILE, SUMMARY_FILE
from pipelines.present.plots import Axis, Level, Line, line_plot, smoothed
from pipelines.present.prediction import standalone
from pipelines.present.report.charts import SMOOTHING
from pipelines.present.report.series import batches, evaluations
from schemas.records import Metric

TITLE = "Accuracy on held-out questions and training reward over weight versions"
LEGEND = ("held-out questions, greedy", f"training reward, mean over {SMOOTHING} steps")


def main() -> None:
    """Draw the plot of the run in the first argument into the file of the second."""
    folder, target = map(Path, sys.argv[1:3])
    best = json.loads((folder / SUMMARY_FILE).read_text("utf-8")).get("heldout_warm_start_best")
    target.write_text(standalone(plot(read_metrics(folder / METRICS_FILE), best), TITLE, LEGEND), encoding="utf-8")


def plot(metrics: list[Metric], best: float | None) -> str:
    """The plot without style and legend; `best` is the accuracy of the best supervised checkpoint, if there is one."""
    greedy = [(float(each.version), each.greedy) for each in evaluations(metrics) if each.greedy is not None]
    rewards = [(float(each.step), each.values["reward/mean"]) for each in batches(metrics)]
    lines = [Line("greedy", greedy, 0, dots=True), Line("reward", smoothed(rewards, SMOOTHING), 1)]
    levels = [] if best is None else [Level(f"best supervised checkpoint, greedy: {best:.2f}", best)]
    x = Axis("weight version", lambda value: f"{value:.0f}", low=0)
    return line_plot(TITLE, lines, x, Axis("", lambda value: f"{value:.1f}", low=0, high=1), levels)


if __name__ == "__main__":
    main()
