"""Predictions of runs that are calibrated from these runs themselves, beside what was measured in them.

    python -m benchmarks.calibrated runs/NAME [runs/OTHER ...] [--json]

Each is the folder of a run of any engine, with the files `config.toml` and `metrics.jsonl`, and its log. For the
demonstration on CPUs: `laminar run examples/chain_sum.toml`, then this command with its folder. Both are from the end
of the second optimizer step to the end of the last.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.emulated_runs import measure
from pipelines.cli.predict import overheads_of
from pipelines.inspect.metrics_file import read_metrics
from pipelines.inspect.run_files import METRICS_FILE
from pipelines.present.report.machine import describe_machine
from pipelines.simulate.prediction.calibration import calibrate
from pipelines.simulate.prediction.cluster import Cluster
from pipelines.simulate.prediction.search import predict

FIGURES = ("trained_tokens_per_s", "trainer_idle", "rollout_idle", "kv_use", "staleness_mean", "staleness_max")
Compared = Mapping[str, tuple[float, float]]


def compared(folder: Path) -> Compared:
    """Predicted and measured FIGURES of the run in `folder`. Raises ConfigError, RunFailed for a run too short."""
    config, metrics = calibrate(folder), read_metrics(folder / METRICS_FILE)
    measured = measure(metrics, [], config.run.time_scale, config.rollout.emulation.stride)
    predicted = predict(Cluster(config, overheads_of(folder)))
    return {name: (getattr(predicted, name), getattr(measured, name)) for name in FIGURES}


def table(found: Mapping[str, Compared]) -> Table:
    """A row of each run: each figure predicted / measured, and the difference in throughput."""
    rows = Table(title="Calibrated predictions, predicted / measured")
    for column in ("run", "trained tokens/s", "difference", "trainer idle", "rollouts idle", "KV", "staleness", "max"):
        rows.add_column(column, justify="left" if column == "run" else "right")
    for name, figures in found.items():
        rate, measured = figures["trained_tokens_per_s"]
        shares = [f"{100 * a:.1f} / {100 * b:.1f} %" for a, b in map(figures.get, FIGURES[1:4])]  # type: ignore[misc]
        (mean, real_mean), (most, real_most) = figures["staleness_mean"], figures["staleness_max"]
        staleness = f"{mean:.2f} / {real_mean:.2f}", f"{most:.0f} / {real_most:.0f}"
        rows.add_row(
            name, f"{rate:,.0f} / {measured:,.0f}", f"{100 * (rate / measured - 1):+.1f} %", *shares, *staleness
        )
    return rows


def main() -> None:
    """Predict and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run")
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    found = {folder.name: compared(folder) for folder in options.runs}
    if options.json:
        print(json.dumps(found))
        return
    Console(width=120).print(table(found))
    print(describe_machine())


if __name__ == "__main__":
    main()
