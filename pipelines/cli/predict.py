"""The part of `laminar simulate` that predicts clusters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from infra.escaping import print_escaped
from infra.files import write_atomically
from infra.kafka.readiness import BrokerUnreachable
from pipelines.cli.options import connect
from pipelines.config import Config, ConfigError, load_config, parse_config, plain_table
from pipelines.inspect.metrics_file import read_metrics
from pipelines.inspect.run_files import CONFIG_FILE, METRICS_FILE
from pipelines.present.output import Report
from pipelines.present.prediction import candidates_plot, candidates_table, prediction_lines
from pipelines.present.progress import ProgressPrinter
from pipelines.simulate.prediction.assumptions import Assumptions
from pipelines.simulate.prediction.calibration import calibrate
from pipelines.simulate.prediction.cluster import Cluster, Overheads
from pipelines.simulate.prediction.machines import Memory
from pipelines.simulate.prediction.measured_overheads import measured_overheads
from pipelines.simulate.prediction.search import Candidate, predict, recommended, search


@dataclass(frozen=True)
class PredictionOptions:
    """The options of a prediction: a configuration file or a run's folder, with changes, and its machines.

    GPUs that are None are those of the configuration: `trainer.ranks`, `rollout.tensor_parallel`.
    """

    file: Path | None
    run: Path | None
    changes: Sequence[str]
    train_gpus: int | None
    replica_gpus: int | None
    machine: str
    weights_gb: float
    gpu_hour: float
    kv_kb: float = 0.0
    assumptions: Assumptions | None = None
    """Of a run whose engine is not emulated; None: such a run is refused."""

    @property
    def memory(self) -> Memory | None:
        """The memory that limits the cluster; None without these options. Raises ConfigError if some are missing."""
        if not self.machine and not self.weights_gb and not self.kv_kb:
            return None
        if not self.machine or not self.weights_gb:
            given = "--machine" if self.machine else "--weights-gb" if self.weights_gb else "--kv-kb"
            raise ConfigError(f"{given} alone checks nothing: give --machine and --weights-gb (GB of the weights) both")
        return Memory(self.machine, self.weights_gb, self.kv_kb)

    def cluster(self) -> Cluster:
        """The cluster. Raises ConfigError for one that is invalid or impossible."""
        try:
            overheads = Overheads() if self.run is None else overheads_of(self.run)
            config = self._config()
            own = config if self.run is None else load_config(self.run / CONFIG_FILE)
            gpus = self.train_gpus or own.trainer.ranks, self.replica_gpus or own.rollout.tensor_parallel
            if self.assumptions is not None and not config.emulated:
                return self.assumptions.cluster(config, *gpus)
            if self.assumptions not in (None, Assumptions()):
                raise ConfigError(
                    "--emulation, --prompt-tokens, --p50 and --p99 are for runs with a real engine, before they run: "
                    "this one has times and lengths of its own, change them with --set"
                )
            return Cluster(config, overheads, train_gpus=gpus[0], gpus_per_replica=gpus[1])
        except ValueError as error:
            raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error

    def _config(self) -> Config:
        if self.run is None:
            assert self.file is not None
            return load_config(self.file, self.changes)
        if self.file is not None:
            raise ConfigError("--calibrate takes the configuration of its run: leave out CONFIG.toml, or use --set")
        calibrated = calibrate(self.run)
        return parse_config(plain_table(calibrated), f"the calibration by {self.run}", self.changes)


def overheads_of(run: Path) -> Overheads:
    """The overheads that the log of a run's folder shows; the defaults, with a line that says why, if it shows none."""
    file = run / METRICS_FILE
    try:
        log = connect(str(run.absolute()), None, None, read_only=True)
        found = measured_overheads(log.client, log.run, read_metrics(file)) if file.exists() else None
        reason = f"the log of {run} has too few batches"
    except (BrokerUnreachable, typer.BadParameter) as error:
        found, reason = None, f"the log of {run} cannot be read: {error}"
    if found is None:
        found = Overheads()
        print_escaped(f"{reason}. Between roles {found.hop_s} s and {found.batch_s} s a batch are assumed", err=True)
    return found


def predict_report(question: PredictionOptions, *, search: bool, plot: Path | None, json: bool) -> Report:
    """The prediction, or with `search` all candidates and a recommendation. Raises ConfigError."""
    cluster, memory = question.cluster(), question.memory
    if search:
        return _search_report(cluster, question, plot, json)
    if plot is not None:
        raise ConfigError("--plot shows the candidates of --search: add --search")
    try:
        if memory is not None:
            memory.check(cluster)
        with ProgressPrinter(f"simulates {cluster.replicas} replicas, which may take minutes"):
            found = predict(cluster)
    except ValueError as error:
        raise ConfigError(f"this cluster cannot run: {error}") from error
    data = {**_shape(cluster), **found.to_json(), **_cost(found.gpu_hours_per_billion_tokens, question.gpu_hour)}
    return Report(data, lambda: "\n".join(prediction_lines(cluster, found, question.gpu_hour)), json)


def _search_report(cluster: Cluster, question: PredictionOptions, plot: Path | None, json: bool) -> Report:
    candidates: list[Candidate] = []
    with ProgressPrinter(
        "simulates candidates, each of which may take minutes", so_far=lambda: f", {len(candidates)} done"
    ):
        candidates.extend(search(cluster, memory=question.memory))
    try:
        best = recommended(candidates)
    except ValueError as error:
        raise ConfigError(f"no candidate can run: {error}") from error
    if plot is not None:
        write_atomically(plot, candidates_plot(candidates))
    data = {"candidates": [_row(each, question) for each in candidates], "recommended": _row(best, question)}
    return Report(data, lambda: candidates_table(candidates, best, question.gpu_hour), json)


def _row(candidate: Candidate, question: PredictionOptions) -> dict[str, Any]:
    found = candidate.prediction
    row = {"kind": candidate.kind, **_shape(candidate.cluster)}
    if found is None:
        return {**row, "error": candidate.error}
    return {**row, **found.to_json(), **_cost(found.gpu_hours_per_billion_tokens, question.gpu_hour)}


def _shape(cluster: Cluster) -> dict[str, Any]:
    return {
        "train_gpus": cluster.train_gpus,
        "replicas": cluster.replicas,
        "gpus_per_replica": cluster.gpus_per_replica,
        "max_staleness": cluster.config.experience.max_staleness,
        "hop_s": cluster.overheads.hop_s,
        "batch_s": cluster.overheads.batch_s,
        "not_predicted": cluster.not_predicted,
    }


def _cost(gpu_hours: float, price: float) -> dict[str, float]:
    return {"cost_per_billion_tokens": gpu_hours * price} if price else {}
