"""`laminar trajectory`: one trajectory's whole life, from the log."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text

from pipelines.cli.option_sets import Commands
from pipelines.cli.options import RUNS, Address, JsonOption
from pipelines.inspect.log.describe import describe_outcome, describe_record
from pipelines.inspect.log.history import History, history_of
from pipelines.inspect.log.matching import MatchingRecord
from pipelines.present.output import Report, Texts
from pipelines.present.token_colours import Tokens, coloured, tokens_of
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
) -> Report | Texts:
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
    parts = filter(None, history_of(to.client, to.run, key))
    began = next(parts, None)
    if began is None:
        raise RuntimeError(f"the log of run {to.run} knows no trajectory {name}")
    spelt = partial(_tokens, model=model or _model_of(address.run))
    if not json:
        return Texts(_texts(name, chain([began], parts), spelt, colour))
    life = History([*began, *chain.from_iterable(parts)])
    return Report(_facts(name, life, spelt(life)), str, as_json=True)


def _tokens(life: History, model: Path | None) -> Tokens | None:
    finished = life.first(Trajectory)
    return tokens_of(finished.record, model) if finished else None


def _model_of(run: str | None) -> Path | None:
    """The model that a run under ./runs began with; None where there is no such run."""
    try:
        config = tomllib.loads((RUNS / (run or "latest") / "config.toml").read_text(encoding="utf-8"))
    except OSError:
        return None
    return Path(config.get("model", {}).get("path", ""))


def _facts(name: str, life: History, tokens: Tokens | None) -> dict[str, Any]:
    return {
        "trajectory": name,
        "outcome": describe_outcome(life),
        "events": [{**event._asdict(), "record": to_plain(event.record)} for event in life.events],
        "tokens": None if tokens is None else tokens._asdict(),
    }


def _texts(
    name: str, parts: Iterable[list[MatchingRecord]], spelt: Callable[[History], Tokens | None], colour: str
) -> Iterator[Any]:
    life = History([])
    for part in parts:
        life.events.extend(part)
        yield Text("\n").join(_line(event, life.events[0].timestamp) for event in part)
    yield f"{name}: {describe_outcome(life)}"
    tokens = spelt(life)
    yield from coloured(tokens, colour) if tokens else ()


def _line(event: MatchingRecord, began: int) -> Text:
    where = f"{event.topic} {event.partition}:{event.offset}"
    return Text(f"  {(event.timestamp - began) / 1000:>9.3f} s  {where:<24} {describe_record(event.record)}")
