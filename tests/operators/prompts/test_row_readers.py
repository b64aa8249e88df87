"""Row readers: Parquet, Hugging Face folders, and the layouts of verl, TRL and GSM8K."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from operators.prompts.config import PromptsConfig
from operators.prompts.question import Question, SourceError
from operators.prompts.sources import open_source
from schemas.records import Message

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}
TRL = {"prompt": [{"role": "user", "content": "What is 1 + 1?"}], "solution": "2"}
TRL_TEXT = {"prompt": "What is 1 + 1?", "ground_truth": "2"}
GSM8K = {"question": "What is 1 + 1?", "answer": "One and one is two.\n#### 2"}


def only_question(config: PromptsConfig) -> Question:
    source = open_source(config)
    try:
        assert not source.bad_rows
        return source[0]
    finally:
        source.close()


def save(path: Path, row: dict) -> str:
    if path.suffix == ".jsonl":
        path.write_text(json.dumps(row))
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
    return str(path)


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("row", "options", "task", "turns"),
    [
        (VERL, {}, "openai/gsm8k", 2),
        (TRL, {}, "rows", 1),
        (TRL_TEXT, {}, "rows", 0),
        (GSM8K, {"answer_after": "####", "task": "gsm8k"}, "gsm8k", 0),
        (VERL, {"answer_column": "reward_model.ground_truth"}, "openai/gsm8k", 2),
    ],
)
def test_layouts_are_detected(tmp_path: Path, source: str, row: dict, options: dict, task: str, turns: int) -> None:
    config = PromptsConfig(source=source, path=save(tmp_path / f"rows.{source}", row), **options)
    question = only_question(config)
    assert (question.task, question.reference) == (task, {"answer": "2"})
    assert "What is 1 + 1?" in question.text
    assert len(question.messages) == turns
    if turns:
        assert question.messages[-1] == Message("user", "What is 1 + 1?")


def test_columns_can_be_configured_with_extra_columns(tmp_path: Path) -> None:
    row = {"query": "How many?", "gold": {"value": 3}, "tests": ["a", "b"], "unused": 1}
    path = save(tmp_path / "rows.parquet", row)
    options = {"prompt_column": "query", "answer_column": "gold.value", "extra_columns": ("tests",)}
    question = only_question(PromptsConfig(source="parquet", path=path, **options))
    assert (question.text, question.reference) == ("How many?", {"answer": 3, "tests": ["a", "b"]})
    with pytest.raises(
        SourceError, match=r"no column prompt or .*, only query, gold, tests, unused; set prompts.prompt_column"
    ):
        open_source(PromptsConfig(source="parquet", path=path))
    with pytest.raises(SourceError, match=r"set prompts\.answer_column"):
        open_source(PromptsConfig(source="parquet", path=path, prompt_column="query"))
    bare = PromptsConfig(source="parquet", path=path, prompt_column="query", answer_required=False)
    assert only_question(bare).reference == {}


def rows_with_times(path: Path) -> str:
    """Three rows, of which the second has no rate and the third no time."""
    hours = [datetime(2026, 1, 31, hour, tzinfo=timezone(timedelta(hours=2))) for hour in (12, 14)]
    columns = {"question": ["one?", "two?", "three?"], "answer": [1, 2, 3], "rate": [0.5, None, 0.2]}
    table = pa.table(columns | {"at": pa.array([*hours, None], pa.timestamp("us", "UTC"))})
    if path.suffix == ".jsonl":
        rows = [{name: value for name, value in row.items() if value is not None} for row in table.to_pylist()]
        path.write_text("\n".join(json.dumps(row, default=datetime.isoformat) for row in rows))
    else:
        pq.write_table(table, path)
    return str(path)


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_conditions_select_rows_by_nulls_and_times(tmp_path: Path, source: str) -> None:
    path = rows_with_times(tmp_path / f"rows.{source}")
    for where, expected in {
        "rate is null": ["two?"],
        "rate is not null and at is not null": ["one?"],
        "at <= '2026-01-31T10:00'": ["one?"],
        "at is null or at > '2026-01-31T11:59'": ["two?", "three?"],
    }.items():
        found = open_source(PromptsConfig(source=source, path=path, where=where, epochs=1, shuffle=False))
        assert [found[number].text for number in range(found.total or 0)] == expected, where
        assert not found.bad_rows
        found.close()
    config = PromptsConfig(source=source, path=path, where="at < '2026-01-31T11:00'")
    assert datetime.fromisoformat(only_question(config).reference["at"]) == datetime(2026, 1, 31, 10, tzinfo=UTC)


@pytest.mark.parametrize(("source", "column"), [("jsonl", "rat"), ("jsonl", "meta.rate"), ("parquet", "meta.rat")])
def test_condition_on_a_column_of_no_row_raises(tmp_path: Path, source: str, column: str) -> None:
    row = {"question": "one?", "answer": 1, "meta": {"level": None}}
    path = save(tmp_path / f"rows.{source}", row)
    with pytest.raises(SourceError, match=rf"no column {column} in any row, only answer, meta, question; "):
        open_source(PromptsConfig(source=source, path=path, where=f"{column} is null"))
    source_with = open_source(PromptsConfig(source=source, path=path, where="meta.level is null"))
    assert source_with[0].reference == {"answer": 1, "meta.level": None}
    source_with.close()


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_answers_are_taken_where_they_are_if_not_required(tmp_path: Path, source: str) -> None:
    rows = [{"question": "one?", "gold": "#### 1"}, {"question": "two?", "gold": None}, {"question": "3?", "gold": "?"}]
    path = tmp_path / f"rows.{source}"
    if source == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    config = PromptsConfig(source=source, path=str(path), answer_column="gold", answer_required=False, shuffle=False)
    found = open_source(replace(config, answer_after="####"))
    assert [found[number].reference for number in range(3)] == [{"answer": "1"}, {}, {}]
    other = open_source(replace(config, answer_column="solution"))
    assert other[0].reference == {}
    for each in (found, other):
        assert not each.bad_rows
        each.close()


def test_condition_on_the_answer_leaves_it_as_rewards_get_it(tmp_path: Path) -> None:
    rows = [{"question": "one?", "answer": "1 is it #### 1"}, {"question": "two?", "answer": "#### 2"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = str(tmp_path / "rows.jsonl")
    found = open_source(PromptsConfig(source="jsonl", path=path, answer_after="####", where="answer ~ '1'"))
    assert found[0].reference == {"answer": "1"}
    found.close()


def test_parquet_is_read_at_random_despite_bad_rows(tmp_path: Path) -> None:
    questions = [None if i == 7 else f"Question {i}?" for i in range(3000)]
    table = pa.table({"question": questions, "answer": list(range(3000))})
    pq.write_table(table, tmp_path / "q.parquet", row_group_size=100)
    source = open_source(PromptsConfig(source="parquet", path=str(tmp_path / "q.parquet"), epochs=1))
    assert [(row.line, "prompt or" in row.reason) for row in source.bad_rows] == [(8, True)]
    drawn = [source[number] for number in range(source.total or 0)]
    assert all(question.text == f"Question {question.reference['answer']}?" for question in drawn)
    assert {question.index for question in drawn} == set(range(3000)) - {7}


def arrow_stream(path: Path, first: int, count: int) -> None:
    """As `datasets` writes it: the stream format, in several batches."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = range(first, first + count)
    table = pa.table({"question": [f"Question {i}?" for i in rows], "answer": [str(i) for i in rows]})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def saved_dataset(folder: Path, first: int) -> None:
    for shard in (0, 1):
        arrow_stream(folder / f"data-0000{shard}-of-00002.arrow", first + 5 * shard, 5)
    files = [{"filename": f"data-0000{shard}-of-00002.arrow"} for shard in (0, 1)]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": None}))
    (folder / "dataset_info.json").write_text("{}")
    # A cache file of `datasets` beside the data; it must be ignored.
    arrow_stream(folder / "cache-0123456789abcdef.arrow", 900, 5)


def answers(path: Path, **options: str) -> list[int]:
    source = open_source(PromptsConfig(source="dataset", path=str(path), epochs=1, shuffle=False, **options))
    return [int(source[number].reference["answer"]) for number in range(source.total or 0)]


def test_rows_and_held_out_ones_of_a_dotted_folder_have_one_task(tmp_path: Path) -> None:
    for name, first in (("sums.v1", 0), ("held.v2", 100)):
        saved_dataset(tmp_path / name, first)
    config = PromptsConfig(source="dataset", path=str(tmp_path / "sums.v1"), heldout_path=str(tmp_path / "held.v2"))
    source = open_source(config)
    assert {question.task for question in (*source.heldout, source[0])} == {"sums.v1"} == {config.task_name}
    source.close()


def test_saved_dataset_is_read_from_its_state_file(tmp_path: Path) -> None:
    saved_dataset(tmp_path, 0)
    assert answers(tmp_path) == list(range(10))
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [], "_indices_data_files": [{"filename": "x"}]}))
    with pytest.raises(SourceError, match="flatten_indices"):
        answers(tmp_path)


def test_saved_dictionary_of_splits_is_read(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    saved_dataset(tmp_path / "train", 0)
    saved_dataset(tmp_path / "test", 100)
    assert answers(tmp_path) == list(range(10))
    assert answers(tmp_path, split="test") == list(range(100, 110))
    with pytest.raises(SourceError, match="no split 'tests'; did you mean 'test'"):
        answers(tmp_path, split="tests")


def test_folder_of_parquet_files_is_read_by_split_name(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, value in (("train-00000-of-00002", 1), ("train-00001-of-00002", 2), ("test-00000-of-00001", 3)):
        pq.write_table(pa.table({"question": ["Why?"], "answer": [value]}), tmp_path / "data" / f"{name}.parquet")
    assert answers(tmp_path) == [1, 2]
    assert answers(tmp_path, split="test") == [3]
    with pytest.raises(SourceError, match="no split 'validation'"):
        answers(tmp_path, split="validation")


def test_folder_without_splits_is_read_completely(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", 2)):
        pq.write_table(pa.table({"question": ["Why?"], "answer": [value]}), tmp_path / f"{name}.parquet")
    assert answers(tmp_path) == [1, 2]


def test_broken_tables_raise_with_their_path(tmp_path: Path) -> None:
    (tmp_path / "q.parquet").write_bytes(b"not parquet")
    with pytest.raises(SourceError, match=r"cannot read .*q\.parquet"):
        open_source(PromptsConfig(source="parquet", path=str(tmp_path / "q.parquet")))
    (tmp_path / "folder").mkdir()
    with pytest.raises(SourceError, match=r"no \.parquet or \.arrow"):
        answers(tmp_path / "folder")
