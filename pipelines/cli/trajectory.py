"""`laminar trajectory`: one trajectory's history, read from the log."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Address, ColourOption, JsonOption, ModelOption
from pipelines.inspect.log.describe import describe_outcome, describe_record
from pipelines.inspect.log.history import TrajectoryHistory, history_of
from pipelines.inspect.log.matching import MatchingRecord
from pipelines.inspect.log.turns import turns_of, turns_to_plain
from pipelines.inspect.run_folders import config_file
from pipelines.present.output import Report, Texts
from pipelines.present.token_colours import Tokens, coloured, tokens_of
from pipelines.present.turns import environment_lines, turn_lines
from schemas.identity import parse_trajectory_id
from schemas.plain import to_plain
from schemas.records import AGENT

app = Commands()


@app.command()
def trajectory(
    name: Annotated[str, typer.Argument(metavar="ID", help="Its id: p12.3; e7.0 for evaluation, i0.0 imported.")],
    address: Address,
    colour: ColourOption = "logprob",
    model: ModelOption = None,
    json: JsonOption = False,
) -> Report | Texts:
    """Show a trajectory's history: its prompt, its replicas, all progress and moves, and its outcome.

    Each line has the record's position, for `laminar topics get`. Exits with 1 if the log has no such trajectory.

    \b
    Examples:
      laminar trajectory p12.3
      laminar trajectory p12.3 --colour version
      laminar trajectory e7.0 --json | jq '.events[].topic'
    """
    try:
        key = parse_trajectory_id(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="ID") from error
    connection = address.open_log()
    parts = filter(None, history_of(connection.client, connection.run, key))
    first = next(parts, None)
    if first is None:
        raise RuntimeError(f"the log of run {connection.run} has no trajectory {name}")
    read_tokens = partial(_tokens, model=model or model_of(address.folder))
    if not json:
        return Texts(_texts(name, chain([first], parts), read_tokens, colour))
    history = TrajectoryHistory([*first, *chain.from_iterable(parts)])
    return Report(_to_json(name, history, read_tokens(history)), str, as_json=True)


def _tokens(history: TrajectoryHistory, model: Path | None) -> Tokens | None:
    return None if history.trajectory is None else tokens_of(history.trajectory, model)


def model_of(folder: Path | None) -> Path | None:
    """Return the initial model of the run in `folder`; None if there is none."""
    settings = settings_of(folder)
    return None if settings is None else Path(settings.get("model", {}).get("path", ""))


def settings_of(folder: Path | None) -> dict[str, Any] | None:
    """Return the configuration of the run in `folder` as it is written; None if there is none."""
    file = None if folder is None else config_file(folder)
    return None if file is None else tomllib.loads(file.read_text(encoding="utf-8"))


def _to_json(name: str, history: TrajectoryHistory, tokens: Tokens | None) -> dict[str, Any]:
    turns = turns_of(event.record for event in history.events)
    return {
        "trajectory": name,
        "outcome": describe_outcome(history),
        "turns": turns_to_plain(turns) if turns else None,
        "events": [{**event._asdict(), "record": to_plain(event.record)} for event in history.events],
        "tokens": None if tokens is None else tokens._asdict(),
    }


def _texts(
    name: str,
    parts: Iterable[list[MatchingRecord]],
    read_tokens: Callable[[TrajectoryHistory], Tokens | None],
    colour: str,
) -> Iterator[Any]:
    history = TrajectoryHistory([])
    for part in parts:
        history.events.extend(part)
        yield Text("\n").join(_line(event, history.events[0].timestamp) for event in part)
    yield f"{name}: {describe_outcome(history)}"
    if turns := turns_of(event.record for event in history.events):
        yield Text("\n").join(map(Text, turn_lines(turns)))
    tokens, finished = read_tokens(history), history.trajectory
    if finished is not None and finished.episode is not None and finished.prompt.environment != AGENT:
        lines = environment_lines(finished, tokens.texts if tokens else None)
        yield Text("\n").join(map(Text, lines))
    yield from coloured(tokens, colour if sys.stdout.isatty() else "none") if tokens else ()


def _line(event: MatchingRecord, start: int) -> Text:
    position = f"{event.topic} {event.partition}:{event.offset}"
    return Text(f"  {(event.timestamp - start) / 1000:>9.3f} s  {position:<24} {describe_record(event.record)}")
