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
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG.toml", help="The configuration of an emulated run.")
    ] = None,
    *,
    calibrate: Calibrate = None,
    train_gpus: TrainGpus = 1,
    replica_gpus: ReplicaGpus = 1,
    weights_gb: Annotated[
        float, typer.Option("--weights-gb", min=0, callback=finite, help="GB of the model's weights.")
    ] = 0.0,
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
    Only an emulated run says how long its engine takes; another one is measured first, and its folder given by
    --calibrate in place of CONFIG.toml.

    \b
    Examples:
      laminar cost examples/emulated.toml --train-gpus 64 --replica-gpus 4 --gpu-hour 2.50
      laminar cost --calibrate runs/first --gpu-hour 2.50
      laminar cost run.toml --train-gpus 64 --replica-gpus 4 --weights-gb 65.6 --copies 2 --json
    """
    from pipelines.cli.predict import PredictionOptions
    from pipelines.config import ConfigError
    from pipelines.present.prediction import cost_lines
    from pipelines.simulate.prediction.cost import ResourcePrices, cost_of
    from pipelines.simulate.prediction.search import predict

    if config is None and calibrate is None:
        raise typer.BadParameter("give the configuration of an emulated run, or --calibrate RUN", param_hint="CONFIG")
    own_clock = ["run.time_scale=1", *(changes or [])]
    options = PredictionOptions(config, calibrate, own_clock, train_gpus, replica_gpus, "", weights_gb, gpu_hour)
    cluster = options.cluster()
    try:
        found = cost_of(
            cluster, predict(cluster), ResourcePrices(gpu_hour, kafka_gb), copies=copies, weights_gb=weights_gb
        )
    except ValueError as error:
        raise ConfigError(f"this cluster cannot run: {error}") from error
    return Report(found.to_json(), lambda: "\n".join(cost_lines(cluster, found)), json)
