"""Tables of topics in the documents, made from the catalogue: `python -m pipelines.present.topic_table` prints them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pipelines.restart_reads import OBSERVERS, READS
from schemas.topics import CATALOGUE, PREFIX, Retention, Topic

_RETENTION: Mapping[Retention, str] = {
    "trim": "for good, until `laminar runs trim`",
    "newest": "the newest record of each key (compacted, segments of 4 MiB)",
    "window": "`kafka.metrics_hours` (168); `metrics.jsonl` in the run's folder has all",
}


def topic_table() -> str:
    """The topics of a run as a Markdown table, without a line break at its end."""
    head = ("topic", "records", "key", "partitions", "cleanup", "written by", "read by", "what it carries")
    return markdown(head, map(_topic_row, CATALOGUE.values()))


def writers_table() -> str:
    """The topics that several processes write, and why the open transaction of one of them does no harm."""
    several = [topic for topic in CATALOGUE.values() if topic.has_several_writers]
    head = ("topic", "written by", "producers", "when a writer dies inside a transaction")
    return markdown(head, map(_writers_row, several))


def restart_table() -> str:
    """What a start of each role reads of each topic, and what bounds it."""
    roles = [
        (short_name, kind, role, why) for role, reads in READS.items() for (short_name, kind), why in reads.items()
    ]
    watchers = [(short_name, "", "observers", why) for short_name, why in OBSERVERS.items()]
    rows = [
        (f"`{short_name}`", f"{role} ({kind})" if kind else role, why)
        for topic in CATALOGUE
        for short_name, kind, role, why in (*roles, *watchers)
        if short_name == topic
    ]
    return markdown(("topic", "role", "a start reads"), rows)


def retention_table() -> str:
    """What of each topic goes by itself, and what `laminar runs trim` takes."""
    return markdown(("topic", "kept"), [(f"`{t.short_name}`", _RETENTION[t.retention]) for t in CATALOGUE.values()])


TABLES: Mapping[str, Callable[[], str]] = {
    "topics": topic_table,
    "writers": writers_table,
    "restarts": restart_table,
    "retention": retention_table,
}
"""Every table by the name in its markers, `<!-- name -->` and `<!-- /name -->`."""


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table, without a line break at its end."""
    head = tuple(head)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))


def with_table(text: str, name: str = "topics") -> str:
    """`text` with table `name` between its markers. Raises ValueError where they are missing."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise ValueError(f"the text has no {begin} ... {end}")
    return f"{before}{begin}\n{TABLES[name]()}\n{end}{after}"


def _topic_row(topic: Topic) -> tuple[str, ...]:
    return (
        f"`{PREFIX}.<run>.{topic.short_name}`",
        ", ".join(topic.record_names),
        topic.key or "none",
        topic.partitions,
        topic.cleanup,
        ", ".join(topic.producers),
        ", ".join(topic.consumers) or "people and tools",
        topic.description,
    )


def _writers_row(topic: Topic) -> tuple[str, ...]:
    kind = "transactional" if topic.transactional else "plain"
    return f"`{topic.short_name}`", ", ".join(topic.producers), kind, topic.if_a_writer_dies


if __name__ == "__main__":
    print("\n\n".join(f"<!-- {name} -->\n{table()}\n<!-- /{name} -->" for name, table in TABLES.items()))
