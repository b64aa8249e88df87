"""README's table of topics, made from the catalogue: `python -m pipelines.cli.topic_table` prints it."""

from __future__ import annotations

from schemas.topics import CATALOGUE, PREFIX, Topic

BEGIN, END = "<!-- topics -->", "<!-- /topics -->"
_HEAD = ("topic", "records", "key", "partitions", "cleanup", "written by", "read by", "what it carries")


def topic_table() -> str:
    """The topics of a run as a Markdown table, without a line break at its end."""
    rows = [_HEAD, ("---",) * len(_HEAD), *map(_row, CATALOGUE.values())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def with_table(text: str) -> str:
    """`text` with what stands between the markers replaced by the table. Raises ValueError where they are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the text has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{topic_table()}\n{END}{after}"


def _row(topic: Topic) -> tuple[str, ...]:
    return (
        f"`{PREFIX}.<run>.{topic.noun}`",
        ", ".join(topic.carries),
        topic.key or "none",
        topic.partitions,
        topic.cleanup,
        ", ".join(topic.producers),
        ", ".join(topic.consumers) or "people and tools",
        topic.about,
    )


if __name__ == "__main__":
    print(topic_table())
