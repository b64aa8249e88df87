"""The topic tables of docs/topics.md, from the catalogue: `python -m pipelines.present.topic_table docs/topics.md`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pipelines.restart_reads import OBSERVERS, READS
from pipelines.trim.plan import OF_RESTARTS, OF_TRAJECTORIES
from schemas.topics import CATALOGUE, DEAD_LETTERS, PREFIX, RELAY, Retention, Topic

_RETENTION: Mapping[Retention, str] = {
    "trim": "without limit, until `laminar runs trim`",
    "newest": "the newest record of each key (compacted, segments of 4 MiB)",
    "window": "`kafka.metrics_hours` (168); `metrics.jsonl` in the run's folder keeps all of a batch or version",
}


def topic_table() -> str:
    """Return the topics of a run as a Markdown table, without a final line break."""
    head = ("topic", "records", "key", "partitions", "cleanup", "written by", "read by", "contents")
    return markdown(head, map(_topic_row, CATALOGUE.values()))


def writers_table() -> str:
    """Return the topics that several processes write, with the effect of a writer that dies inside a transaction."""
    several = [topic for topic in CATALOGUE.values() if topic.has_several_writers]
    head = ("topic", "written by", "producers", "if a writer dies inside a transaction")
    return markdown(head, map(_writers_row, several))


def restart_table() -> str:
    """Return what each role reads of each topic at its start, and the bound on it."""
    roles = [(name, kind, role, reads) for role, each in READS.items() for (name, kind), reads in each.items()]
    observers = [(name, "", "observers", reads) for name, reads in OBSERVERS.items()]
    rows = [
        (f"`{name}`", f"{role} ({kind})" if kind else role, reads)
        for topic in CATALOGUE
        for name, kind, role, reads in (*roles, *observers)
        if name == topic
    ]
    return markdown(("topic", "role", "read at start"), rows)


def retention_table() -> str:
    """Return the retention of each topic: what Kafka deletes, and what only `laminar runs trim` deletes."""
    return markdown(("topic", "retention"), [(f"`{each.short_name}`", _retention(each)) for each in CATALOGUE.values()])


def _retention(topic: Topic) -> str:
    if topic is DEAD_LETTERS:
        return "without limit: with their payloads, up to 8 MiB each"
    if topic.retention == "trim" and topic not in (*OF_TRAJECTORIES, *OF_RESTARTS, RELAY):
        return "without limit: small"
    return _RETENTION[topic.retention]


TABLES: Mapping[str, Callable[[], str]] = {
    "topics": topic_table,
    "writers": writers_table,
    "restarts": restart_table,
    "retention": retention_table,
}
"""The tables by the name in their markers, `<!-- name -->` and `<!-- /name -->`."""


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table, without a final line break."""
    head = tuple(head)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))


def marked(name: str) -> str:
    """Return table `name` between the markers that it has in documents."""
    return f"<!-- {name} -->\n{TABLES[name]()}\n<!-- /{name} -->"


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


def main() -> None:
    """Replace every marked table of the file in the first argument."""
    file = Path(sys.argv[1])
    text = file.read_text(encoding="utf-8")
    for name in TABLES:
        before, begin, rest = text.partition(f"<!-- {name} -->")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        if not begin or not end:
            raise ValueError(f"{file} has no markers <!-- {name} --> and <!-- /{name} -->")
        text = f"{before}{marked(name)}{after}"
    file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
