"""`laminar topics schema`: the schemas of a topic's records, so that other programs can decode them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from pipelines.cli.topic_names import TopicArgument, known_topic
from pipelines.present.output import Chunks, Report
from schemas.codec import record_type
from schemas.plain import to_plain
from schemas.published import record_schema
from schemas.records import RecordSchema


def schema_command(
    topic: TopicArgument,
    *,
    record: Annotated[str, typer.Option("--record", help="One record type of several, for example Trajectory.")] = "",
    form: Annotated[
        Literal["text", "json", "arrow"],
        typer.Option("--output", "-O", help="arrow: the schema as an Arrow IPC stream without batches."),
    ] = "text",
) -> Report | Chunks:
    """Print the schemas of a topic's records. The header `laminar-schema` of each record names its schema.

    Arrow values are record batch messages without their schema: decode them with the schema that this command prints,
    or with the one in the run's topic `schemas`.

    \b
    Examples:
      laminar topics schema trajectories -O json
      laminar topics schema experiences -O arrow > experiences.arrow-schema
    """
    kinds = {kind.__name__: kind for kind in known_topic(topic, "run")[1].record_classes}
    if record and record not in kinds:
        raise typer.BadParameter(f"--record {record!r}: the records of {topic} are {', '.join(kinds)}")
    schemas = [record_schema(record_type(kind)) for name, kind in kinds.items() if record in ("", name)]
    if form == "arrow":
        return Chunks([_only_arrow(schemas, topic)])
    data = [{name: value for name, value in to_plain(each).items() if name != "arrow"} for each in schemas]
    return Report(data, lambda: "\n\n".join(map(_text, data)), as_json=form == "json")


def _only_arrow(schemas: list[RecordSchema], topic: str) -> bytes:
    arrow = [schema for schema in schemas if schema.arrow]
    if len(arrow) != 1:
        names = ", ".join(schema.schema.partition("/")[0] for schema in arrow) or "none"
        raise typer.BadParameter(
            f"-O arrow prints one schema; records of {topic} in Arrow: {names} (choose by --record)"
        )
    return arrow[0].arrow


def _text(schema: dict[str, Any]) -> str:
    lines = [f"  {each['name']}: {each['type']}{' or null' if each['nullable'] else ''}" for each in schema["fields"]]
    return "\n".join([f"{schema['schema']} ({schema['encoding']})", *lines])
