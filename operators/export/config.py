"""What an export holds, and how it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa

from infra.storage import StorageFolder
from operators.export.columns import row_schema
from operators.export.formats import Format
from operators.export.views import ViewName, view_of
from operators.export.where import parse_where
from schemas.topics import CATALOGUE, Topic


@dataclass(frozen=True)
class Contents:
    """What the rows of an export are: fixed when its folder is made. `starts` is the first offset of each partition."""

    run: str
    topic: str
    format: Format = "parquet"
    view: ViewName = "full"
    where: str = ""
    starts: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        view_of(self.of, self.view)
        if self.where:
            parse_where(self.where, row_schema(self.of))

    @property
    def of(self) -> Topic:
        """The topic."""
        return CATALOGUE[self.topic]

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of its files."""
        return view_of(self.of, self.view).schema

    def kept(self, rows: pa.Table) -> pa.Table:
        """Those of `rows`, full ones, that the view and `where` leave."""
        for condition in (view_of(self.of, self.view).condition, self.where):
            if condition:
                rows = parse_where(condition, rows.schema).rows(rows)
        return rows

    def made(self, rows: pa.Table) -> pa.Table:
        """What a file holds of `rows`, kept ones."""
        return view_of(self.of, self.view).make(rows)


@dataclass(frozen=True)
class ExportConfig:
    """An export: `contents` into `folder`, in files of about `file_bytes` in memory.

    To `follow` is to go on with what comes; what has come is then in a file within `every_s` seconds.
    """

    folder: StorageFolder
    contents: Contents
    follow: bool = False
    file_bytes: int = 64 << 20
    every_s: float = 60.0

    def __post_init__(self) -> None:
        if self.file_bytes < 1 or not self.every_s > 0:
            raise ValueError("file_bytes and every_s must be positive")
