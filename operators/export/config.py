"""The contents of an export, and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from infra.conditions.tables import table_condition
from infra.setting_types import CheckedSettings, Positive, PositiveInt
from infra.storage import StorageFolder
from operators.export.columns import row_schema
from operators.export.formats import Format
from operators.export.views import SPLITS, TEXT_VIEWS, Split, ViewName, turns_in_context, view_of
from schemas.topics import CATALOGUE, Topic


@dataclass(frozen=True)
class Contents(CheckedSettings):
    """What an export contains; fixed when its folder is created. `starts` is the first offset of each partition."""

    run: str
    topic: str
    format: Format = "parquet"
    view: ViewName = "full"
    where: str = ""
    starts: Mapping[int, int] = field(default_factory=dict)
    split: Split = "all"
    """Of experiences and trajectories: the rows of training, those of held-out questions, or all."""
    messages: bool = False
    """Of TEXT_VIEWS: prompts and answers are lists of messages."""
    tokenizer: str = ""
    """Of TEXT_VIEWS with texts: the model folder whose tokenizer decodes turns in their context; "": as recorded."""

    def _check(self) -> None:
        view_of(self.source, self.view, self.messages)
        if self.split != "all" and "purpose" not in row_schema(self.source).names:
            raise ValueError(f"{self.topic} have no split: their rows do not say which questions are held out")
        if self.where:
            table_condition(self.where, row_schema(self.source))

    @property
    def source(self) -> Topic:
        """The topic's entry in the catalogue."""
        return CATALOGUE[self.topic]

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of its files."""
        return view_of(self.source, self.view, self.messages).schema

    def selected_rows(self, rows: pa.Table) -> pa.Table:
        """The rows of `rows` (with all columns) for which the conditions of the view and `where` hold."""
        for condition in self.conditions:
            rows = table_condition(condition, rows.schema).rows(rows)
        return rows

    @property
    def conditions(self) -> list[str]:
        """The conditions that all its rows satisfy: of the split, of the view, and `where`."""
        every = (SPLITS[self.split], view_of(self.source, self.view, self.messages).condition, self.where)
        return [condition for condition in every if condition]

    def view_rows(self, rows: pa.Table) -> pa.Table:
        """The rows of a file, made from selected `rows`."""
        if self.tokenizer and self.view in TEXT_VIEWS and not self.messages:
            rows = turns_in_context(rows, Path(self.tokenizer))
        return view_of(self.source, self.view, self.messages).transform(rows)


@dataclass(frozen=True)
class ExportConfig(CheckedSettings):
    """An export of `contents` into `folder`, in files of about `file_bytes` in memory.

    With `follow` the export continues with new records and writes each to a file within `every_s` seconds.
    """

    folder: StorageFolder
    contents: Contents
    follow: bool = False
    file_bytes: PositiveInt = 64 << 20
    every_s: Positive = 60.0
