"""`laminar cost`: GPU hours and Kafka bytes of an optimizer step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Calibrate, GpuHour, JsonOption, ReplicaGpus, TrainGpus, finite
from pipelines.cli.run import SetOption
from pipelines.present.output import Report

app = Commands()


@app.command()
def cost(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG.toml", help="The configuration of a run.")] = None,
    *,
    calibrate: Calibrate = None,
    emulation: Annotated[
        Path | None,
        typer.Option(
            "--emulation", metavar="FILE", help="Times of a real engine and trainer: an emulated run's configuration."
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", min=1, help="Tokens of a prompt; assumed without.")
    ] = None,
    p50: Annotated[
        float | None, typer.Option("--p50", min=1, callback=finite, help="Median of response lengths, in tokens.")
    ] = None,
    p99: Annotated[
        float | None, typer.Option("--p99", min=1, callback=finite, help="99th percentile of response lengths.")
    ] = None,
    train_gpus: TrainGpus = None,
    replica_gpus: ReplicaGpus = None,
    weights_gb: Annotated[
        float | None,
        typer.Option("--weights-gb", min=0, callback=finite, help="GB of the weights; by default the model's."),
    ] = None,
    copies: Annotated[int, typer.Option("--copies", min=1, help="Copies that Kafka keeps of a record.")] = 3,
    gpu_hour: GpuHour = 0.0,
    kafka_gb: Annotated[
        float, typer.Option("--kafka-gb", min=0, callback=finite, help="Price of a GB written, each copy.")
    ] = 0.0,
    changes: SetOption = None,
    json: JsonOption = False,
) -> Report:
    """Predict GPU hours and bytes in Kafka of an optimizer step, and of a day, with their prices if given.

    Time comes from the same prediction as `laminar simulate CONFIG.toml`, with run.time_scale = 1. Bytes are of records
    that are encoded as a run encodes them, without compression and each trajectory alone in its record: an upper bound
    for the topics listed. Commit notes, heartbeats, plans and held-out evaluation are not counted.
    An emulated run says how long its engine takes. Of another one that is assumed, and so are its lengths; the output
    names each assumption. By default times are those of the emulated engine's built-in table (Qwen2.5-32B on four
    H800, 16 train), with the size of the run's model: by its config.json, or by its name if it is one of
    examples/setups. A run that has generated for some minutes is measured: give its folder by --calibrate in place of
    CONFIG.toml.

    \b
    Examples:
      laminar cost examples/emulated.toml --train-gpus 64 --replica-gpus 4 --gpu-hour 2.50
      laminar cost examples/setups/qwen2.5-7b.toml --gpu-hour 2.50
      laminar cost run.toml --emulation measured.toml --p50 900 --p99 6000 --copies 2 --json
      laminar cost --calibrate runs/first --gpu-hour 2.50
    """
    from pipelines.cli.predict import PredictionOptions
    from pipelines.config import ConfigError
    from pipelines.present.prediction import cost_lines
    from pipelines.simulate.prediction.assumptions import Assumptions
    from pipelines.simulate.prediction.cost import ResourcePrices, cost_of
    from pipelines.simulate.prediction.search import predict

    if config is None and calibrate is None:
        raise typer.BadParameter("give the configuration of a run, or --calibrate RUN", param_hint="CONFIG")
    own_clock = ["run.time_scale=1", *(changes or [])]
    assumptions = Assumptions(emulation, prompt_tokens, p50, p99)
    options = PredictionOptions(
        *(config, calibrate, own_clock, train_gpus, replica_gpus, "", 0.0, gpu_hour), assumptions=assumptions
    )
    cluster = options.cluster()
    weights = cluster.weights_gb if weights_gb is None else weights_gb
    try:
        found = cost_of(
            cluster, predict(cluster), ResourcePrices(gpu_hour, kafka_gb), copies=copies, weights_gb=weights
        )
    except ValueError as error:
        raise ConfigError(f"this cluster cannot run: {error}") from error
    gpus = {name: getattr(cluster, name) for name in ("train_gpus", "replicas", "gpus_per_replica")}
    data = {**found.to_json(), **gpus, "assumed": cluster.assumed}
    return Report(data, lambda: "\n".join(cost_lines(cluster, found)), json)
