"""`laminar runs delete`: delete runs that have ended."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from time import sleep
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.counted import counted
from infra.sizes import size_text
from pipelines.cli.options import JsonOption, RunClient, RunsFolder, connect
from pipelines.inspect.run_folders import RUNS
from pipelines.present.output import Report

if TYPE_CHECKING:
    from pipelines.run.deletion import Deletion

WATCH_S = 10.0
"""How long the topics of a run are watched: each role writes heartbeats or metrics more often."""


def delete_command(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Runs, as `laminar runs list` shows them.")],
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    topics: Annotated[
        bool, typer.Option("--topics", help="Also delete the runs' topics on your own Kafka (kafka.bootstrap_servers).")
    ] = False,
    folder: RunsFolder = RUNS,
    json: JsonOption = False,
) -> Report:
    """Delete runs: their folders with logs and checkpoints, and their weight stores in shared memory.

    Shows what it frees, and requests a confirmation. A run that is running, or of which a process is alive, is
    refused, and then none is deleted. Links are removed, and what they name stays; checkpoints in
    trainer.checkpoint_folder and versions in relay.object_store stay, too. After a kill in the middle
    `laminar runs list` shows the run as `deleting`: delete it again.

    \b
    Examples:
      laminar runs delete first
      laminar runs delete first second --yes
      laminar runs delete first --topics
    """
    from pipelines.run.deletion import delete_run, plan_deletion

    planned = [plan_deletion(folder, name) for name in dict.fromkeys(names)]
    elsewhere = [_is_elsewhere(each) for each in planned]
    logs = {
        each.folder: connect(str(each.newest.absolute()), None, None)
        for each, away in zip(planned, elsewhere, strict=True)
        if topics and away
    }
    watched = {place: _Watched(log) for place, log in logs.items()}
    if watched:
        sleep(WATCH_S)
    _refuse_written(watched.values())
    rows = [_row(each, watched.get(each.folder)) for each in planned]
    freed = sum(row["bytes"] + row["store_bytes"] for row in rows)
    plan = [_line(row, stay=away and not topics) for row, away in zip(rows, elsewhere, strict=True)]
    if not yes and not _confirmed(plan, f"Delete {counted(len(rows), 'run')}, and free {size_text(freed)}?"):
        advice = "" if sys.stdin.isatty() else " The answer must come from a terminal; elsewhere use --yes."
        reason = f"Nothing was deleted.{advice}"
        return Report({"deleted": False, "runs": rows, "freed_bytes": 0}, lambda: reason, as_json=json, exit_code=1)
    _refuse_written(watched.values())
    for each in planned:
        delete_run(each, partial(_delete_topics, logs.get(each.folder)))
    text = "\n".join(
        [*(plan if yes else ()), f"deleted {', '.join(row['run'] for row in rows)}: {size_text(freed)} freed"]
    )
    return Report({"deleted": True, "runs": rows, "freed_bytes": freed}, lambda: text, as_json=json)


def _confirmed(plan: list[str], question: str) -> bool:
    from pipelines.present.progress import print_error_line

    for line in plan:
        print_error_line(line)
    return sys.stdin.isatty() and typer.confirm(question, err=True)


def _is_elsewhere(planned: Deletion) -> bool:
    """Return whether the run's topics are on a Kafka that is not its own."""
    from pipelines.inspect.run_folders import NoSuchRun, read_any

    try:
        state = read_any(planned.newest).state
        known = state.get("bootstrap_servers") or state.get("client_properties")
    except NoSuchRun:  # the rest of an earlier deletion
        return False
    return bool(known) and not (planned.newest / "kafka").is_dir()


class _Watched:
    """The topics of a run on a Kafka that is not its own, watched for roles that work on any machine.

    Only whether topics grow counts: the clocks of the roles' machines do not matter.
    """

    def __init__(self, log: RunClient) -> None:
        self._log = log
        self._ends = self._read_ends()

    @property
    def topics(self) -> list[str]:
        """The names of the topics."""
        return sorted({place.topic for place in self._ends})

    def refuse_written(self) -> None:
        """Raise RuntimeError if something has written to the topics since they are watched."""
        written = {place.topic for place, end in self._read_ends().items() if end > self._ends.get(place, 0)}
        if written:
            raise RuntimeError(
                f"something wrote to {', '.join(sorted(written))} while they were watched: stop the roles of run "
                f"{self._log.run} on all machines before you delete its topics"
            )

    def _read_ends(self) -> dict[Any, int]:
        from infra.kafka.admin import admin_client, end_offsets, list_topics
        from schemas.topics import run_prefix

        with admin_client(self._log.client) as admin:
            return end_offsets(admin, list_topics(admin, run_prefix(self._log.run)), committed=False)


def _refuse_written(watched: Iterable[_Watched]) -> None:
    for each in watched:
        each.refuse_written()


def _delete_topics(log: RunClient | None) -> None:
    if log is None:
        return
    from infra.kafka.admin import admin_client, delete_topics
    from schemas.topics import run_prefix

    with admin_client(log.client) as admin:
        delete_topics(admin, run_prefix(log.run))


def _row(planned: Deletion, watched: _Watched | None) -> dict[str, Any]:
    return {
        "run": planned.folder.name,
        "folder": str(planned.folder),
        "bytes": planned.freed_bytes,
        "stores": list(map(str, planned.stores)),
        "store_bytes": sum(planned.stores.values()),
        "topics": None if watched is None else watched.topics,
    }


def _line(row: dict[str, Any], *, stay: bool) -> str:
    parts = [f"{size_text(row['bytes'])} in {row['folder']}"]
    parts += [f"{size_text(row['store_bytes'])} in {', '.join(row['stores'])}"] if row["stores"] else []
    parts += [] if row["topics"] is None else [f"{len(row['topics'])} topics"]
    parts += ["its topics stay: --topics deletes them, too"] if stay else []
    return f"run {row['run']}: {', '.join(parts)}"
