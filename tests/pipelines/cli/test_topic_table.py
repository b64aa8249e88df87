"""README's table of topics is the catalogue's."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.cli.topic_table import BEGIN, END, topic_table, with_table
from schemas.topics import CATALOGUE

README = Path(__file__).parents[3] / "README.md"


def test_the_table_has_a_row_a_topic_and_as_many_cells_in_each() -> None:
    head, rule, *rows = topic_table().splitlines()
    assert len(rows) == len(CATALOGUE)
    assert {line.count(" | ") for line in (head, rule, *rows)} == {7}
    for topic, row in zip(CATALOGUE.values(), rows, strict=True):
        assert f".{topic.noun}`" in row
        assert topic.about in row


def test_the_table_replaces_what_stands_between_the_markers() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert with_table(text) == f"before\n{BEGIN}\n{topic_table()}\n{END}\nafter\n"
    assert with_table(with_table(text)) == with_table(text)
    with pytest.raises(ValueError, match="has no"):
        with_table("nothing")


def test_readme_holds_the_table_as_it_is_now() -> None:
    text = README.read_text(encoding="utf-8")
    assert with_table(text) == text, "out of date: put what `python -m pipelines.cli.topic_table` prints there"
