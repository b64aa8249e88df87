"""`laminar submit`: one pipeline alone, on any runner."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pipelines.cli.options import JsonOption
from pipelines.cli.run import ConfigArgument, SetOption
from pipelines.present.output import Report
from pipelines.roles import PIPELINES, Role

if TYPE_CHECKING:
    from infra.runners.options import Runner
    from pipelines.config import Config

app = typer.Typer()


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def submit(
    context: typer.Context,
    pipeline: Annotated[str, typer.Argument(metavar="PIPELINE", help=f"One of {', '.join(PIPELINES)}.")],
    config: ConfigArgument,
    changes: SetOption = None,
    index: Annotated[
        int, typer.Option("--index", min=0, help="Which rollout process, relay, shard of the buffer or rank it is.")
    ] = 0,
    replica: Annotated[
        int | None, typer.Option("--replica", min=0, help="Run the rollout process that hosts this replica.")
    ] = None,
    runner: Annotated[
        Literal["embedded", "prism", "flink", "portable"], typer.Option("--runner", help="The Beam runner.")
    ] = "embedded",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show graph, topics, options and what is missing; run nothing.")
    ] = False,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="With --dry-run: draw the graph there, too.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Leave it running, and have it submitted again if its job is lost.")
    ] = False,
    json: JsonOption = False,
) -> Report | None:
    """Run one pipeline in the foreground until it is stopped; SIGTERM and Ctrl-C drain it.

    CONFIG must name the run, the brokers and the model: runs/NAME/config.toml of a started run does. Beam's own options
    follow after `--`. A --dry-run exits with 1 where something is missing. What is detached is looked after by `laminar
    runs status`, `logs`, `stop`, `drain` and `resume`. A rollout may join a run at work, beyond those that it began
    with: --index and --replica go up to placement.max_replicas.

    \b
    Examples:
      laminar submit score runs/latest/config.toml
      laminar submit rollout runs/latest/config.toml --replica 3
      laminar submit placement run.toml --runner flink -- --flink_master=localhost:8081
      laminar submit placement run.toml --dry-run --svg placement.svg
      laminar submit score run.toml --detach
    """
    if pipeline not in PIPELINES:
        raise typer.BadParameter(f"there is no pipeline {pipeline!r}; there are {', '.join(PIPELINES)}")
    if replica is not None and (pipeline != "rollout" or index):
        raise typer.BadParameter("--replica is for rollout, and instead of --index", param_hint="--replica")
    from pipelines.config import load_config
    from pipelines.roles import configure_logging, run_role
    from pipelines.run.submission.standalone import prepare

    loaded = load_config(config, changes or [])
    role = Role(pipeline, index if replica is None else replica // loaded.rollout.replicas)
    if dry_run:
        return _outlined(loaded, role, runner, context.args, svg, json)
    if detach:
        return _detached(loaded, role, runner, context.args, json)
    configure_logging()
    try:
        prepare(loaded, role, lambda line: typer.echo(line, err=True))
        run_role(loaded, role, runner, context.args)
    except KeyboardInterrupt:  # before it ran: from then on Ctrl-C drains
        raise typer.Exit(130) from None
    return None


def _outlined(
    config: Config, role: Role, runner: Runner, beam_options: list[str], svg: Path | None, json: bool
) -> Report:
    from dataclasses import asdict, replace

    from pipelines.run.submission import drawing
    from pipelines.run.submission.outline import existing_topics, outline

    existing, silent = existing_topics(config) if config.run.name else ({}, None)
    found = outline(config, role, runner, beam_options, existing)
    if silent is not None and silent not in found.missing:
        found = replace(found, missing=(*found.missing, silent))
    if svg is not None:
        svg.write_text(drawing.svg(found), encoding="utf-8")
    return Report(asdict(found), lambda: drawing.text(found), as_json=json, exit_code=1 if found.missing else 0)


def _detached(config: Config, role: Role, runner: str, beam_options: list[str], json: bool) -> Report:
    from pipelines.config import ConfigError
    from pipelines.run.submission.detached import detach

    if not config.run.name:
        raise ConfigError("run.name is not set: which run's topics to read and write")
    kept = detach(config, role, runner, beam_options)
    data = {"role": role.name, "run": config.run.name, "pid": kept.pid, "log": str(kept.log)}
    return Report(data, lambda: f"{role.name} of run {config.run.name} is kept by process {kept.pid}: {kept.log}", json)
