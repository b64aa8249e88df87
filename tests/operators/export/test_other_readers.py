"""Exports are read by pyarrow, DuckDB, Polars and `load_dataset`, which know nothing of Laminar."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from datasets import load_dataset
from export_factories import CONTENTS, exported_to, polled

from infra.files import sha256_of
from operators.export.card import write_card
from operators.export.folder import DATA, STATE, read_parts
from operators.export.formats import Format, json_value, read_table, write_table
from operators.export.views import TEXT_VIEWS, ViewName

VIEWS: tuple[ViewName, ...] = ("full", "trl", "sft", "preference", "verl")


def exported(
    folder: Path, form: Format = "parquet", view: ViewName = "full", messages: bool = False
) -> list[dict[str, Any]]:
    """A dataset of two files, with the columns of an older release in the first; its rows."""
    contents = replace(CONTENTS, format=form, view=view, messages=messages)
    exported_to(folder, [polled(0, 3), polled(4, 3, last=True)], contents, file_bytes=1)
    rows = pa.concat_tables(read_table(folder / DATA / part.file, form, contents.schema) for part in read_parts(folder))
    write_card(folder)
    return rows.to_pylist()


def aged(folder: Path, column: str) -> None:
    """Rewrite the first file as a release before `column` would have written it."""
    part = read_parts(folder)[0]
    file = folder / DATA / part.file
    write_table(file, read_table(file, "parquet", CONTENTS.schema).drop_columns([column]), "parquet")
    manifest = folder / STATE / "manifest-00000000.json"
    manifest.write_text(manifest.read_text().replace(part.sha256, sha256_of(file)))


def loaded(folder: Path, cache: Path) -> list[dict[str, Any]]:
    return load_dataset(str(folder), split="train", cache_dir=str(cache)).to_list()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("view", "messages"), [*((view, False) for view in VIEWS), *((view, True) for view in TEXT_VIEWS)]
)
def test_every_view_is_read_by_all_readers(tmp_path: Path, view: ViewName, messages: bool) -> None:
    folder = tmp_path / "export"
    rows = exported(folder, view=view, messages=messages)
    assert len(rows) in (12, 6)
    files = str(folder / DATA / "*.parquet")
    assert ds.dataset(folder / DATA).to_table().to_pylist() == rows
    assert (
        duckdb.sql(f"select * from '{files}' order by kafka_offset, kafka_row")
        .to_arrow_table()
        .select(list(rows[0]))
        .to_pylist()
        == rows
    )
    assert polars.read_parquet(files).to_dicts() == rows
    assert loaded(folder, tmp_path / "cache") == rows


@pytest.mark.parametrize("form", ["arrow", "jsonl"])
def test_arrow_and_jsonl_are_read_by_their_readers(tmp_path: Path, form: Format) -> None:
    folder = tmp_path / "export"
    rows = exported(folder, form)
    files = str(folder / DATA / f"*.{form}")
    if form == "arrow":
        assert ds.dataset(folder / DATA, format="ipc").to_table().to_pylist() == rows
        assert polars.read_ipc(files).to_dicts() == rows
        assert loaded(folder, tmp_path / "cache") == rows
    else:
        lines = [json_value(row) for row in rows]
        assert polars.read_ndjson(files).select(list(rows[0])).to_dicts() == lines
        assert [row["trajectory_id"] for row in loaded(folder, tmp_path / "cache")] == [
            r["trajectory_id"] for r in rows
        ]
        counted = duckdb.sql(f"select count(*), sum(reward) from read_json_auto('{files}')").fetchall()
        assert counted == [(12, 6.0)]


def test_later_column_is_null_in_older_files(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    rows = exported(folder)
    aged(folder, "reward")
    there = [None if at < 6 else row["reward"] for at, row in enumerate(rows)]
    files = str(folder / DATA / "*.parquet")
    union = duckdb.sql(f"select reward from read_parquet('{files}', union_by_name => true)").fetchall()
    assert [reward for (reward,) in union] == there
    newest = polars.read_parquet_schema(folder / DATA / read_parts(folder)[-1].file)
    scanned = polars.scan_parquet(files, schema=newest, missing_columns="insert").collect()
    assert scanned["reward"].to_list() == there
    assert [row["reward"] for row in loaded(folder, tmp_path / "cache")] == there
    assert ds.dataset(folder / DATA, schema=CONTENTS.schema).to_table()["reward"].to_pylist() == there
