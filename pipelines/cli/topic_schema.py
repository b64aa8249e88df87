"""`laminar topics schema`: the schemas of a topic's records, so that other programs can decode them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import typer

from pipelines.cli.topic_names import TopicArgument, known_topic
from pipelines.present.output import Chunks, Report
from schemas.codec import RecordType, record_type


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

    Arrow values are record batch messages without their schema: decode them with the schema that this command prints.

    \b
    Examples:
      laminar topics schema trajectories -O json
      laminar topics schema experiences -O arrow > experiences.arrow-schema
    """
    kinds = {kind.__name__: kind for kind in known_topic(topic, "run")[1].record_classes}
    if record and record not in kinds:
        raise typer.BadParameter(f"--record {record!r}: the records of {topic} are {', '.join(kinds)}")
    entries = [record_type(kind) for name, kind in kinds.items() if record in ("", name)]
    if form == "arrow":
        return Chunks([_arrow_stream(entries, topic)])
    data = [{"schema": entry.schema, "encoding": entry.encoding, "fields": list(_fields(entry))} for entry in entries]
    return Report(data, lambda: "\n\n".join(map(_text, data)), as_json=form == "json")


def _arrow_stream(entries: list[RecordType], topic: str) -> bytes:
    import pyarrow as pa

    from schemas.arrow import arrow_schema

    arrow = [entry for entry in entries if entry.encoding == "arrow"]
    if len(arrow) != 1:
        names = ", ".join(entry.kind.__name__ for entry in arrow) or "none"
        raise typer.BadParameter(
            f"-O arrow prints one schema; records of {topic} in Arrow: {names} (choose by --record)"
        )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, arrow_schema(arrow[0].kind)):
        pass
    return bytes(sink.getvalue().to_pybytes())


def _fields(entry: RecordType) -> Iterator[dict[str, Any]]:
    if entry.encoding == "arrow":
        from schemas.arrow import arrow_schema

        for column in arrow_schema(entry.kind):
            yield {"name": column.name, "type": str(column.type), "nullable": column.nullable}
    else:
        yield from _json_fields(entry.kind, "")


def _json_fields(kind: Any, prefix: str) -> Iterator[dict[str, Any]]:
    from schemas.shape import fields_of

    for field in fields_of(kind):
        kind_name = getattr(field.of, "__name__", str(field.of))
        text = kind_name if field.kind == "scalar" else f"{field.kind} of {kind_name}"
        yield {"name": prefix + field.name, "type": text, "nullable": field.optional}
        if hasattr(field.of, "__dataclass_fields__"):
            yield from _json_fields(field.of, f"{prefix}{field.name}.")


def _text(schema: dict[str, Any]) -> str:
    lines = [f"  {each['name']}: {each['type']}{' or null' if each['nullable'] else ''}" for each in schema["fields"]]
    return "\n".join([f"{schema['schema']} ({schema['encoding']})", *lines])
