"""`laminar run`: run all pipelines on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.option_sets import Commands
from pipelines.present.output import Report

app = Commands()

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The run's configuration.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one setting; may be repeated.")
]


@app.command()
def run(
    context: typer.Context,
    config: ConfigArgument,
    changes: SetOption = None,
    name: Annotated[str, typer.Option("--name", help="The run's name; by default the file's name and the time.")] = "",
    check: Annotated[
        bool, typer.Option("--check", help="Check the configuration as a start does, and start nothing.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON at the end.")] = False,
) -> Report:
    """Train a model with all pipelines on this machine: broker, warm start, roles, evaluation, audit and report.

    All results are in runs/NAME. Exits with 0 if the goal was reached and the audit passed: no trajectory lost or
    trained twice. Before a broker is started the settings, this machine, the model's files, and the first prompts
    with their rewards and environments are checked, and all problems are reported together; --check does only that.

    \b
    Examples:
      laminar run examples/chain_sum.toml
      laminar run examples/my_model.toml --check
      laminar run examples/chain_sum.toml --set trainer.optimizer_steps=40 --set run.seed=1
      laminar run examples/my_model.toml --set kafka.bootstrap_servers='"kafka:9092"'
    """
    from pipelines.config import read_config
    from pipelines.run.start_checks import check_locally, check_start, named
    from pipelines.run.stop_requests import StopRequests

    given = [f'run.name="{name}"'] if name else []
    read = read_config(config, [*(changes or []), *given])
    draft = named(read, config)
    if check:
        return check_locally(draft, config, as_json=json)
    stops = context.with_resource(StopRequests(final=bool(context.obj)))  # installed before the run starts
    if (stopped := check_start(draft, stops, as_json=json)) is not None:  # before the imports below, which take seconds
        return stopped
    from pipelines.run.local import run_locally

    default_name = not read.config.run.name
    return run_locally(draft.checked(), config, stops, changes=changes or [], default_name=default_name, as_json=json)
