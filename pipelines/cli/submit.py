"""`laminar submit`: run one pipeline on any Beam runner."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.escaping import print_escaped
from infra.name_lookup import suggest_name
from infra.runners.liveness import remove_stale_report
from infra.runners.options import RunnerName
from infra.runners.role_logging import configure_logging
from infra.terminal import print_wrapped
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import JsonOption
from pipelines.cli.run import SetOption
from pipelines.distribution import LAMINAR
from pipelines.inspect.run_files import SUBMITTED
from pipelines.inspect.run_folders import run_command
from pipelines.present.output import Report
from pipelines.present.progress import ProgressPrinter
from pipelines.roles import (
    ALL_PIPELINES,
    ALL_SHARDS,
    CANNOT_RUN,
    DATA_PLANE,
    SCALED,
    SHARDED,
    import_pipeline,
    is_permanent,
    relay_of,
    run_process,
    submitted_process,
)

if TYPE_CHECKING:
    from pipelines.config import ConfigDraft

app = Commands()


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def submit(
    context: typer.Context,
    pipeline: Annotated[
        str, typer.Argument(metavar="PIPELINE", help=f"One of {', '.join(ALL_PIPELINES)}, or {DATA_PLANE}.")
    ],
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help="The run's configuration, a TOML file; for rollout and relay also kafka://HOST:PORT[,HOST:PORT…]/RUN.",
        ),
    ],
    changes: SetOption = None,
    index: Annotated[
        int | None,
        typer.Option(
            "--index",
            min=0,
            help="The index of the rollout process, relay, trainer rank or shard; by default 0, or all shards.",
        ),
    ] = None,
    replica: Annotated[
        int | None,
        typer.Option("--replica", min=0, help="Run the rollout process that hosts this replica (instead of --index)."),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option("--machine", metavar="NAME", help="Run the relay of this machine (instead of --index)."),
    ] = None,
    group_size: Annotated[
        int,
        typer.Option("--group-size", min=1, help="Run this many processes; --index then counts such groups, from 0."),
    ] = 1,
    runner: Annotated[RunnerName, typer.Option("--runner", help="The Beam runner.")] = "embedded",
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
    """Run one pipeline, or the data plane, in the foreground until it is stopped; SIGTERM and Ctrl-C drain it.

    CONFIG must set the run's name, the brokers and the model, as runs/NAME/config.toml of a started run does. A relay
    and rollouts on another host need no file of the run: with CONFIG as kafka://HOST:PORT/RUN its settings and its
    tokenizer are read from Kafka, and the weights come from the relay. --set then gives what this host has of its own:
    relay.token_file, the same token as on the others, and with TLS the files of docs/deploy.md. Pass
    Beam's own options after `--`. With --dry-run, exits with 1 if a requirement is missing. Manage detached pipelines
    with `laminar runs status`, `logs`, `stop`, `drain` and `resume`; `laminar runs stop --role ROLE` ends one for good.
    Exit code 2: the configuration cannot be used, so another start would fail again; also when the errors (score) or
    the refused rows (prompts) reach run.stop_error_share or prompts.max_refused_share. With --detach, the prompts and
    code of yours that the role uses are tried first, as by `laminar run`. More rollout processes may join a running
    run: --index and --replica go up to placement.max_replicas. A relay's number follows from its machine's name by
    --machine. A group's processes end together.

    \b
    Examples:
      laminar submit score runs/latest/config.toml
      laminar submit rollout runs/latest/config.toml --replica 3
      laminar submit placement run.toml --runner flink -- --flink_master=localhost:8081
      laminar submit data-plane run.toml --runner flink -- --flink_master=localhost:8081 --parallelism=2
      laminar submit placement run.toml --dry-run --svg placement.svg
      laminar submit score run.toml --detach
      laminar submit relay kafka://kafka:9092/first --machine gpu-7 --set relay.token_file=token
      laminar submit rollout kafka://kafka:9092/first --replica 3 --set relay.token_file=token
    """
    if pipeline not in (*ALL_PIPELINES, DATA_PLANE):
        known = ", ".join((*ALL_PIPELINES, DATA_PLANE))
        hint = suggest_name(pipeline, (*ALL_PIPELINES, DATA_PLANE))
        raise typer.BadParameter(f"{pipeline!r} is not a pipeline{hint or '.'} Choose one of {known}")
    if pipeline == DATA_PLANE and index is not None:
        raise typer.BadParameter(f"{DATA_PLANE} has all shards of its roles", param_hint="--index")
    if replica is not None and (pipeline != "rollout" or index):
        raise typer.BadParameter("--replica is only for rollout, and excludes --index", param_hint="--replica")
    if group_size > 1 and pipeline not in SHARDED:
        raise typer.BadParameter(f"{pipeline} has one process only", param_hint="--group-size")
    if group_size > 1 and (detach or dry_run):
        raise typer.BadParameter("a group runs in the foreground and without --dry-run", param_hint="--group-size")
    if group_size > 1 and (replica is not None or machine is not None):
        raise typer.BadParameter("name a group by --index, which counts groups", param_hint="--group-size")
    if dry_run and detach:
        raise typer.BadParameter("--dry-run submits nothing: leave out --detach", param_hint="--dry-run")
    if svg is not None and not dry_run:
        raise typer.BadParameter("only --dry-run draws the graph", param_hint="--svg")
    if machine is not None and (pipeline != "relay" or index):
        raise typer.BadParameter("--machine is only for relay, and excludes --index", param_hint="--machine")
    if not (dry_run or detach):  # before the imports, which take long
        remove_stale_report(os.environ)
    if group_size > 1:
        raise typer.Exit(_group(context, pipeline, config, changes or [], index or 0, group_size, runner))
    with ProgressPrinter(f"{pipeline}: loads the libraries", only_slow=True):
        draft = _draft(config, pipeline, changes or [])
        loaded = draft.config
        if machine is not None:
            index = relay_of(machine)
        if replica is not None:
            index = replica // loaded.rollout.replicas
        if index is None:
            index = ALL_SHARDS if pipeline in SCALED else 0
        if detach:  # before the larger imports: the role may be submitted already
            return _detached(draft, pipeline, index, runner, context.args, json)
        if dry_run:
            return _outlined(draft, Path(config), pipeline, index, runner, context.args, svg, json)
        from pipelines.run.submission.detached import in_foreground, record_foreground, refuse_submitted

        if loaded.run.name:
            refuse_submitted(loaded, pipeline, index)
        from pipelines.run.run_guard import RunFailing
        from pipelines.run.submission.guard import claimed_store, guarded, prepare
    process = submitted_process(loaded, pipeline, index)
    configure_logging()
    try:
        with in_foreground(loaded, process.roles):
            prepare(draft, process, lambda line: print_escaped(line, err=True))
            record_foreground(loaded, process.name)
            with ProgressPrinter(f"{pipeline}: loads the pipeline", only_slow=True):
                for role in process.roles:
                    import_pipeline(role)
            with claimed_store(loaded, process), guarded(loaded, Path(config), process):
                run_process(loaded, process, runner, context.args)
    except Exception as error:
        detached = (loaded.run_folder / SUBMITTED / f"{process.name}.json").exists()
        if isinstance(error, RunFailing) and detached:
            again = run_command(loaded.run_folder, "runs resume", error.resume)
            error.add_note(f"once that is fixed, resume the run: `{again}`")
        if isinstance(error, RunFailing) or is_permanent(error):  # another start would fail again
            raise _cannot_run(error) from None
        raise
    except KeyboardInterrupt:  # before the pipeline runs; from then on Ctrl-C drains it
        raise typer.Exit(130) from None
    return None


def _draft(source: str, pipeline: str, changes: list[str]) -> ConfigDraft:
    """The configuration in file `source`, or of the run with that address."""
    from pipelines.config import ConfigError, read_config
    from pipelines.run.submission.joining import RunAddress, join_run

    try:
        if (address := RunAddress.of(source)) is not None:
            return join_run(address, pipeline, changes, lambda line: print_escaped(line, err=True))
        return read_config(Path(source), changes)
    except ConfigError as error:
        raise _cannot_run(error) from None


def _cannot_run(error: Exception) -> typer.Exit:
    """Print `error`; the exit code by which a respawner or process manager does not start the role again."""
    text = "; ".join([str(error), *getattr(error, "__notes__", [])])
    print_wrapped("\n  ".join([f"laminar: {text}", *getattr(error, "detail_lines", ())]), err=True)
    return typer.Exit(CANNOT_RUN)


def _group(
    context: typer.Context, pipeline: str, source: str, changes: list[str], index: int, size: int, runner: str
) -> int:
    from pipelines.run.submission.group import run_group

    numbers = range(index * size, (index + 1) * size)
    options = [word for change in changes for word in ("--set", change)] + ["--runner", runner, "--", *context.args]
    commands = [[*LAMINAR, "submit", pipeline, source, "--index", str(number), *options] for number in numbers]
    return run_group(commands, numbers)


def _outlined(
    draft: ConfigDraft,
    file: Path,
    pipeline: str,
    index: int,
    runner: RunnerName,
    beam_options: list[str],
    svg: Path | None,
    json: bool,
) -> Report:
    from dataclasses import asdict, replace

    from pipelines.config import ConfigProblems
    from pipelines.run.run_names import UNNAMED, with_run_name
    from pipelines.run.submission import drawing
    from pipelines.run.submission.outline import outline
    from pipelines.run.topics import existing_topics

    unnamed = [] if draft.config.run.name else [UNNAMED]
    config = with_run_name(draft.config, file)  # an example, to show the topics
    named = config.kafka.bootstrap_servers or config.kafka.client_properties
    process = submitted_process(config, pipeline, index)
    own = replace(config, kafka=config.kafka.for_role(process.roles[0].pipeline))
    existing, problems = existing_topics(own) if named else ({}, [])
    found = outline(config, process, runner, beam_options, existing)
    found = replace(found, missing=tuple(dict.fromkeys([*unnamed, *found.missing, *problems])))
    if draft.problems:
        raise _cannot_run(ConfigProblems(draft.problems_and(found.missing)))
    if svg is not None:
        svg.write_text(drawing.svg(found), encoding="utf-8")
    return Report(asdict(found), lambda: drawing.text(found), as_json=json, exit_code=1 if found.missing else 0)


def _detached(
    draft: ConfigDraft, pipeline: str, index: int, runner: str, beam_options: list[str], json: bool
) -> Report:
    from infra.kafka.readiness import ClientError
    from pipelines.config import ConfigError
    from pipelines.inspect.log.manifests import final_version
    from pipelines.run.submission.detached import detach

    run = draft.config.run.name
    try:
        submission = detach(draft, pipeline, index, runner, beam_options)
    except ConfigError as error:
        raise _cannot_run(error) from None
    name = submission.role.name
    data: dict[str, Any] = {"role": name, "run": run, "respawner": submission.pid}
    text = f"submitted {name} of run {run}: respawner {submission.pid}, log {submission.log}"
    config, last = draft.config, None
    with suppress(ClientError):  # it works, and may not read the topic
        last = final_version(config.kafka.for_role(submission.roles(config)[0].pipeline).client(), run)
    if last is not None and last.number >= config.trainer.optimizer_steps:
        extend = run_command(config.run_folder, "runs resume", "--set trainer.optimizer_steps=NUMBER")
        text += f"; the run has trained all {last.number} steps, so nothing is left to do; to extend it: {extend}"
    data |= {"log": str(submission.log), "trained_steps": None if last is None else last.number}
    return Report(data, lambda: text, json)
