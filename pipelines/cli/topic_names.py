"""Topic names on the command line: a short name of the catalogue, or a full Kafka name."""

from __future__ import annotations

from typing import Annotated

import typer

from infra.name_lookup import suggest_name
from schemas.topics import CATALOGUE, Topic, run_of, run_prefix

TopicArgument = Annotated[
    str, typer.Argument(metavar="TOPIC", help="A short name (trajectories) or a full topic name.")
]


def full_name(topic: str, run: str) -> str:
    """Return the full name of `topic`, a short name of the catalogue or a full name. Raises typer.BadParameter."""
    if topic in CATALOGUE:
        return CATALOGUE[topic].name(run)
    if run_of(topic) is not None:
        return topic
    raise typer.BadParameter(f"{topic!r} is not a topic{suggest_name(topic, CATALOGUE)}")


def known_topic(topic: str, run: str) -> tuple[str, Topic]:
    """Return the full name of `topic` and its catalogue entry. Raises typer.BadParameter."""
    name = full_name(topic, run)
    return name, CATALOGUE[name.removeprefix(run_prefix(run_of(name) or run))]
