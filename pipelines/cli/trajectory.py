"""`laminar trajectory`: one trajectory's whole life, from the log."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text

from pipelines.cli.option_sets import Commands
from pipelines.cli.options import RUNS, Address, JsonOption
from pipelines.cli.output import Report
from pipelines.cli.token_colours import Tokens, coloured, tokens_of
from pipelines.log.life import Life, life_of
from pipelines.log.words import outcome, said
from schemas.identity import parse_trajectory_id
from schemas.plain import to_plain
from schemas.records import Trajectory

app = Commands()


@app.command()
def trajectory(
    name: Annotated[str, typer.Argument(metavar="ID", help="p12.3, or e7.0 of an evaluation.")],
    address: Address,
    colour: Annotated[
        Literal["logprob", "version", "none"], typer.Option("--colour", help="What the colour of a token tells.")
    ] = "logprob",
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="Whose tokenizer spells tokens; the run's model.")
    ] = None,
    json: JsonOption = False,
) -> Report:
    """Tell a trajectory's whole life: its prompt, who had it, every progress and move, its end, and what came of it.

    Each line says where its record stands, for `laminar topics get`. Exits with 1 where the log knows no such one.

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
    to = address.connect()
    life = life_of(to.client, to.run, key)
    if not life.events:
        raise RuntimeError(f"the log of run {to.run} knows no trajectory {name}")
    finished = life.first(Trajectory)
    tokens = tokens_of(finished.record, model or _model_of(address.run)) if finished else None
    return Report(_facts(name, life, tokens), lambda: _text(name, life, tokens, colour), as_json=json)


def _model_of(run: str | None) -> Path | None:
    """The model that a run under ./runs began with; None where there is no such run."""
    try:
        config = tomllib.loads((RUNS / (run or "latest") / "config.toml").read_text(encoding="utf-8"))
    except OSError:
        return None
    return Path(config.get("model", {}).get("path", ""))


def _facts(name: str, life: Life, tokens: Tokens | None) -> dict[str, Any]:
    return {
        "trajectory": name,
        "outcome": outcome(life),
        "events": [{**event._asdict(), "record": to_plain(event.record)} for event in life.events],
        "tokens": None if tokens is None else tokens._asdict(),
    }


def _text(name: str, life: Life, tokens: Tokens | None, colour: str) -> Any:
    from rich.console import Group

    return Group(f"{name}: {outcome(life)}", *_event_lines(life), *(coloured(tokens, colour) if tokens else ()))


def _event_lines(life: Life) -> Iterator[Text]:
    began = life.events[0].timestamp
    for event in life.events:
        where = f"{event.topic} {event.partition}:{event.offset}"
        yield Text(f"  {(event.timestamp - began) / 1000:>9.3f} s  {where:<24} {said(event.record)}")
