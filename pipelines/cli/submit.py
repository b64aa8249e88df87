"""`laminar submit`: run one pipeline on any Beam runner."""

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
        int,
        typer.Option(
            "--index", min=0, help="The index of the rollout process, relay, experience shard or trainer rank."
        ),
    ] = 0,
    replica: Annotated[
        int | None,
        typer.Option("--replica", min=0, help="Run the rollout process that hosts this replica (instead of --index)."),
    ] = None,
    runner: Annotated[
        Literal["embedded", "prism", "flink", "portable"], typer.Option("--runner", help="The Beam runner.")
    ] = "embedded",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show graph, topics, options and missing requirements; run nothing.")
    ] = False,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="With --dry-run: also write the graph to FILE.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Run in the background, and submit it again if the job is lost.")
    ] = False,
    json: JsonOption = False,
) -> Report | None:
    """Run one pipeline in the foreground until it is stopped; SIGTERM and Ctrl-C drain it.

    CONFIG must set the run's name, the brokers and the model, as runs/NAME/config.toml of a started run does. Pass
    Beam's own options after `--`. With --dry-run, exits with 1 if a requirement is missing. Manage detached pipelines
    with `laminar runs status`, `logs`, `stop`, `drain` and `resume`. More rollout processes may join a running run:
    --index and --replica go up to placement.max_replicas.

    \b
    Examples:
      laminar submit score runs/latest/config.toml
      laminar submit rollout runs/latest/config.toml --replica 3
      laminar submit placement run.toml --runner flink -- --flink_master=localhost:8081
      laminar submit placement run.toml --dry-run --svg placement.svg
      laminar submit score run.toml --detach
    """
    if pipeline not in PIPELINES:
        raise typer.BadParameter(f"{pipeline!r} is not a pipeline; choose one of {', '.join(PIPELINES)}")
    if replica is not None and (pipeline != "rollout" or index):
        raise typer.BadParameter("--replica is only for rollout, and excludes --index", param_hint="--replica")
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
    except KeyboardInterrupt:  # before the pipeline runs; from then on Ctrl-C drains it
        raise typer.Exit(130) from None
    return None


def _outlined(
    config: Config, role: Role, runner: Runner, beam_options: list[str], svg: Path | None, json: bool
) -> Report:
    from dataclasses import asdict, replace

    from pipelines.run.submission import drawing
    from pipelines.run.submission.outline import existing_topics, outline

    existing, problem = existing_topics(config) if config.run.name else ({}, None)
    found = outline(config, role, runner, beam_options, existing)
    if problem is not None and problem not in found.missing:
        found = replace(found, missing=(*found.missing, problem))
    if svg is not None:
        svg.write_text(drawing.svg(found), encoding="utf-8")
    return Report(asdict(found), lambda: drawing.text(found), as_json=json, exit_code=1 if found.missing else 0)


def _detached(config: Config, role: Role, runner: str, beam_options: list[str], json: bool) -> Report:
    from pipelines.config import ConfigError
    from pipelines.run.submission.detached import detach

    if not config.run.name:
        raise ConfigError("run.name is not set; it names the run whose topics the pipeline reads and writes")
    submission = detach(config, role, runner, beam_options)
    data = {"role": role.name, "run": config.run.name, "pid": submission.pid, "log": str(submission.log)}
    text = f"submitted {role.name} of run {config.run.name}: process {submission.pid}, log {submission.log}"
    return Report(data, lambda: text, json)
