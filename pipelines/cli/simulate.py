"""`laminar simulate`: histories of failures of a whole run on a simulated cluster, and predictions of clusters."""

from __future__ import annotations

import json as json_text
import logging
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from infra.escaping import print_escaped
from infra.files import write_atomically
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Calibrate, GpuHour, JsonOption, ReplicaGpus, TrainGpus, finite
from pipelines.cli.run import SetOption
from pipelines.present.output import Report
from pipelines.present.progress import ProgressPrinter
from pipelines.simulate.configurations import SHAPES
from pipelines.simulate.explore import draw_history, explore, play, read_history, shrink, to_json
from pipelines.simulate.timeline import lines, trace
from pipelines.simulate.world import SimulatedHistory

app = Commands()
TAIL = 20
"""Events that are printed with a failure."""


@app.command()
def simulate(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG.toml]", help="Predict the emulated run of this configuration.")
    ] = None,
    *,
    count: Annotated[
        int | None, typer.Option("--explore", min=1, help="How many histories to play; by default 100.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The first seed; each history has the next one.")] = 0,
    shape: Annotated[list[str] | None, typer.Option("--shape", help="Only this kind of run; may be repeated.")] = None,
    replay: Annotated[Path | None, typer.Option("--replay", help="Play the history of this file.")] = None,
    timeline: Annotated[bool, typer.Option("--timeline", help="Play one seed, and print its events.")] = False,
    until: Annotated[
        float | None,
        typer.Option("--until", min=0, callback=finite, help="Stop the history at this second; print the state."),
    ] = None,
    step: Annotated[
        float | None,
        typer.Option("--step", min=0.001, callback=finite, help="Print events and state after each STEP seconds."),
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option("--perfetto", help="Write the events of one history, or a failing one, as a trace.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", help="Write the history played, or the first failing one, to this file.")
    ] = None,
    changes: SetOption = None,
    calibrate: Calibrate = None,
    search: Annotated[bool, typer.Option("--search", help="Search for better clusters of as many GPUs.")] = False,
    train_gpus: TrainGpus = None,
    replica_gpus: ReplicaGpus = None,
    machine: Annotated[str, typer.Option("--machine", help="Its accelerators, whose memory is checked: H800.")] = "",
    weights_gb: Annotated[
        float, typer.Option("--weights-gb", min=0, callback=finite, help="GB of the model's weights in bfloat16.")
    ] = 0.0,
    kv_kb: Annotated[
        float, typer.Option("--kv-kb", min=0, callback=finite, help="kB of KV a token, to check rollout.kv_capacity.")
    ] = 0.0,
    gpu_hour: GpuHour = 0.0,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write the candidates as an SVG file.")] = None,
    json: JsonOption = False,
) -> Report:
    """Play histories of failures of a small run, or predict a whole cluster; in one process and in virtual time.

    Without CONFIG: every role runs its real code on a simulated Kafka cluster: processes die, pause, come back after
    their successor, requests are lost, late or executed without a response, and a broker is cut off from the others.
    Some runs have relays and KV transfers on hosts whose links are slow, lossy, cut or damage data; some are trimmed,
    resumed with other shards, or upgraded from an earlier release. One seed is one history, byte for byte. Exits with 1
    at the first history that violates an invariant, with as few faults as still make it fail.

    With CONFIG or --calibrate: real placement and replicas, with emulated engines and trainer, predict throughput, idle
    time, staleness, KV use and cost. A run is predicted in its own clock: --set run.time_scale=1 predicts the cluster.
    --search tries other splits of the GPUs, staleness bounds and, with --machine and --weights-gb, GPUs a replica.

    \b
    Examples:
      laminar simulate --explore 1000
      laminar simulate --seed 17 --timeline --perfetto history.json
      laminar simulate --explore 200 --shape repack --save failing.json
      laminar simulate --replay failing.json --until 12.5
      laminar simulate --replay failing.json --step 1
      laminar simulate examples/emulated.toml --train-gpus 64 --replica-gpus 4
      laminar simulate run.toml --search --train-gpus 64 --replica-gpus 4 --plot splits.svg
      laminar simulate --calibrate runs/first --set rollout.slots=64
    """
    predicts = config is not None or calibrate is not None
    of_histories = {
        "--explore": count is not None,
        "--seed": seed != 0,
        "--shape": bool(shape),
        "--replay": replay is not None,
        "--timeline": timeline,
        "--until": until is not None,
        "--step": step is not None,
        "--perfetto": perfetto is not None,
        "--save": save is not None,
    }
    of_predictions = {
        "--set": bool(changes),
        "--search": search,
        "--train-gpus": train_gpus is not None,
        "--replica-gpus": replica_gpus is not None,
        "--machine": bool(machine),
        "--weights-gb": weights_gb != 0,
        "--kv-kb": kv_kb != 0,
        "--gpu-hour": gpu_hour != 0,
        "--plot": plot is not None,
    }
    for name, given in (of_histories if predicts else of_predictions).items():
        if given:
            kind, change = ("histories", "leave out") if predicts else ("predictions", "add")
            raise typer.BadParameter(f"only for {kind}: {change} CONFIG.toml or --calibrate", param_hint=name)
    if predicts:
        from pipelines.cli.predict import PredictionOptions, predict_report

        question = PredictionOptions(
            config, calibrate, changes or [], train_gpus, replica_gpus, machine, weights_gb, gpu_hour, kv_kb
        )
        return predict_report(question, search=search, plot=plot, json=json)
    shapes = shape or []
    for name in shapes:
        if name not in SHAPES:
            known = ", ".join(SHAPES)
            raise typer.BadParameter(f"there is no shape {name!r}; choose from {known}", param_hint="--shape")
    one = timeline or (replay, until, step) != (None, None, None) or (perfetto is not None and count is None)
    if one and count is not None:
        reason = "it plays many histories: leave out --replay, --timeline, --until, --step"
        raise typer.BadParameter(reason, param_hint="--explore")
    if replay is not None and (seed or shapes):
        reason = "its history has a seed and a shape: leave out --replay, or --seed and --shape"
        raise typer.BadParameter(reason, param_hint="--replay")
    if step is not None and json:
        raise typer.BadParameter("it prints text: leave out --json, or take --until", param_hint="--step")
    logging.disable(logging.WARNING)  # each fault of each history would warn
    try:
        if one:
            drawn = draw_history(seed, shapes) if replay is None else read_history(replay)
            return _one(drawn, until, step, perfetto, save, json)
        return _many(count or 100, seed, shapes, perfetto, save, json)
    finally:
        logging.disable(logging.NOTSET)


def _one(
    drawn: SimulatedHistory,
    until: float | None,
    step: float | None,
    perfetto: Path | None,
    save: Path | None,
    json: bool,
) -> Report:
    """Play one history and show its events, up to second `until` with the state there; or by steps."""
    shown = 0

    def show(history: SimulatedHistory) -> None:
        nonlocal shown
        print_escaped("\n".join([*lines(history, shown), *history.state]))
        shown = len(history.events)
        if sys.stdin.isatty():
            typer.prompt("Enter continues", default="", show_default=False, prompt_suffix="")

    ends, every = (math.inf if each is None else each for each in (until, step))
    history = play(drawn, record_events=True, until=ends, step_s=every, at_step=show)
    _write(history, perfetto, save)
    data = {**to_json(history), "events": [list(event) for event in history.events], "state": history.state}
    return Report(
        data, lambda: "\n".join([*lines(history, shown), *_outcome(history)]), json, int(history.failure is not None)
    )


def _write(history: SimulatedHistory, perfetto: Path | None, save: Path | None) -> None:
    if perfetto is not None:
        write_atomically(perfetto, json_text.dumps(trace(history)))
    if save is not None:
        write_atomically(save, json_text.dumps(to_json(history), indent=1))


def _many(count: int, seed: int, shapes: list[str], perfetto: Path | None, save: Path | None, json: bool) -> Report:
    """Play `count` histories, or up to the first that fails or Ctrl-C."""
    began, played, failing, virtual_s, interrupted = time.process_time(), 0, None, 0.0, False
    with ProgressPrinter("plays histories", only_slow=True, so_far=lambda: f": {played} of {count}") as progress:
        try:
            for history in explore(range(seed, seed + count), shapes):
                played += 1
                virtual_s += history.ended_s
                if history.failure is not None:
                    failing = history
                    progress.begin("shortens the history that failed")
                    failing = play(shrink(history), record_events=True)
                    break
        except KeyboardInterrupt:
            interrupted = True
    if failing is not None:
        _write(failing, perfetto, save)
    data: dict[str, Any] = {
        "histories": played,
        "virtual_seconds": round(virtual_s, 1),
        "cpu_seconds": round(time.process_time() - began, 2),
        "failing": None if failing is None else to_json(failing),
    }

    def text() -> str:
        summary = f"{played} histories, {virtual_s:,.0f} virtual seconds, {data['cpu_seconds']} s of CPU time"
        if failing is None:
            return f"{summary}: {'interrupted, and ' * interrupted}no invariant was violated"
        saved = "" if save is None else f"\nlaminar simulate --replay {save} --timeline"
        tail = [f"the last {TAIL} events:", *list(lines(failing))[-TAIL:]]
        return "\n".join([summary, *tail, *_outcome(failing)]) + saved

    return Report(data, text, json, 130 if interrupted else 0 if failing is None else 1)


def _outcome(history: SimulatedHistory) -> Iterator[str]:
    yield f"seed {history.seed}, shape {history.shape!r}, {len(history.faults)} faults, {history.ended_s:.1f} s"
    for fault in history.faults:
        yield f"  {fault}"
    yield from history.state
    yield "no invariant was violated" if history.failure is None else f"VIOLATED: {history.failure}"
