"""`laminar submit`: one pipeline alone, on any runner."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from pipelines.cli.run import ConfigArgument, SetOption
from pipelines.roles import PIPELINES

app = typer.Typer()


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def submit(
    context: typer.Context,
    pipeline: Annotated[str, typer.Argument(metavar="PIPELINE", help=f"One of {', '.join(PIPELINES)}.")],
    config: ConfigArgument,
    changes: SetOption = None,
    index: Annotated[
        int, typer.Option("--index", min=0, help="Which rollout process, relay worker or rank of the trainer this is.")
    ] = 0,
    replica: Annotated[
        int | None, typer.Option("--replica", min=0, help="Run the rollout process that hosts this replica.")
    ] = None,
    runner: Annotated[
        Literal["embedded", "prism", "flink", "portable"], typer.Option("--runner", help="The Beam runner.")
    ] = "embedded",
) -> None:
    """Run one pipeline in the foreground until it is stopped; SIGTERM and Ctrl-C drain it.

    CONFIG must name the run, the brokers and the model: runs/NAME/config.toml of a started run does. Beam's own options
    follow after `--`. A rollout may join a run at work, beyond those that it began with: --index and --replica go up to
    placement.max_replicas.

    \b
    Examples:
      laminar submit score runs/latest/config.toml
      laminar submit rollout runs/latest/config.toml --replica 3
      laminar submit placement run.toml --runner flink -- --flink_master=localhost:8081
    """
    if pipeline not in PIPELINES:
        raise typer.BadParameter(f"there is no pipeline {pipeline!r}; there are {', '.join(PIPELINES)}")
    if replica is not None and (pipeline != "rollout" or index):
        raise typer.BadParameter("--replica is for rollout, and instead of --index", param_hint="--replica")
    from pipelines.config import load_config
    from pipelines.roles import Role, configure_logging, run_role
    from pipelines.run.alone import get_ready

    loaded = load_config(config, changes or [])
    role = Role(pipeline, index if replica is None else replica // loaded.rollout.replicas)
    configure_logging()
    try:
        get_ready(loaded, role, lambda line: typer.echo(line, err=True))
        run_role(loaded, role, runner, context.args)
    except KeyboardInterrupt:  # before it ran: from then on Ctrl-C drains
        raise typer.Exit(130) from None
