"""Rows, conditions and views of an export: tables in, tables out."""

from __future__ import annotations

import pyarrow as pa
import pytest
from export_factories import experience, rows_of
from record_samples import SAMPLES

from infra.conditions.tables import table_condition
from operators.export.columns import RecordRows, as_table, row_schema
from operators.export.formats import Format, read_table, write_table
from operators.export.views import view_of
from schemas.block import Block
from schemas.topics import CATALOGUE, EXPERIENCES, SETTLED

ROWS = rows_of(experience(0, 0, 1.0), experience(0, 1, 0.25), experience(1, 0, 0.5), experience(1, 1, 0.5, tokens=0))


@pytest.mark.parametrize("short_name", CATALOGUE)
def test_rows_of_every_topic_round_trip_in_every_format(short_name: str, tmp_path) -> None:
    topic = CATALOGUE[short_name]
    blocks = [
        RecordRows.of_one(Block.of([SAMPLES[kind]] * 2), at, 1000 + at) for at, kind in enumerate(topic.record_classes)
    ]
    table = as_table(topic, 3, blocks * 2)
    table.validate(full=True)
    assert len(table) == 4 * len(topic.record_classes)
    assert table["kafka_row"].to_pylist()[:2] == [0, 1]
    for kind in ("parquet", "arrow", "jsonl"):
        form: Format = kind
        write_table(tmp_path / kind, table, form)
        assert read_table(tmp_path / kind, form, row_schema(topic)).to_pylist() == table.to_pylist()


def test_as_table_computes_columns() -> None:
    names = ("trajectory_id", "group_id", "policy_epoch", "policy_version", "staleness", "prompt_tokens")
    assert [ROWS[name].to_pylist()[1] for name in names] == ["p0.1", "p0", 1, 3, 2, 2]
    assert ROWS["policy_version"].to_pylist()[3] is None  # nothing was generated
    assert ROWS["staleness"].to_pylist()[3] is None
    assert ROWS["completion_tokens"].to_pylist() == [4, 4, 4, 0]


def _view(name, rows: pa.Table = ROWS) -> list[dict]:
    view = view_of(EXPERIENCES, name)
    transformed = view.transform(table_condition(view.condition, rows.schema).rows(rows))
    assert transformed.schema.equals(view.schema)
    return transformed.to_pylist()


def test_views_transform_rows() -> None:
    assert [(row["prompt"], row["completion"], row["reward"]) for row in _view("trl")[:2]] == [
        ("What is 0 + 1?", "answer 0", 1.0),
        ("What is 0 + 1?", "answer 1", 0.25),
    ]
    assert [row["trajectory_id"] for row in _view("sft")] == ["p0.0", "p1.0", "p1.1"]
    (pair,) = _view("preference")  # the answers of the other group have equal rewards
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == ("What is 0 + 1?", "answer 0", "answer 1")
    prompts = _view("verl")
    assert [row["extra_info"] for row in prompts] == [{"split": "train", "index": 0}, {"split": "train", "index": 1}]
    assert prompts[0]["prompt"] == [{"role": "user", "content": "What is 0 + 1?"}]
    assert prompts[0]["reward_model"] == {"style": "rule", "ground_truth": '{"answer": "1"}'}


@pytest.mark.parametrize("name", ["trl", "sft", "preference", "verl"])
def test_view_of_no_rows_is_empty(name) -> None:
    assert _view(name, ROWS.slice(0, 0)) == []
    with pytest.raises(ValueError, match="is of experiences"):
        view_of(SETTLED, name)
