"""How people name topics on the command line."""

from __future__ import annotations

import difflib
from typing import Annotated

import typer

from schemas.topics import CATALOGUE, Topic, run_of, run_prefix

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="A noun (trajectories) or a topic's full name.")]


def full_name(topic: str, run: str) -> str:
    """The name of the topic that a user calls `topic`: a noun of the catalogue, or a full name. Raises BadParameter."""
    if topic in CATALOGUE:
        return CATALOGUE[topic].name(run)
    if run_of(topic) is not None:
        return topic
    close = difflib.get_close_matches(topic, CATALOGUE, n=1)
    near = f": did you mean {close[0]}?" if close else "."
    raise typer.BadParameter(f"{topic!r} is no topic{near} There are {', '.join(CATALOGUE)}")


def known_topic(topic: str, run: str) -> tuple[str, Topic]:
    """The full name of the topic that a user calls `topic`, and what it carries. Raises BadParameter."""
    name = full_name(topic, run)
    return name, CATALOGUE[name.removeprefix(run_prefix(run_of(name) or run))]
