"""The dataset card: what the dataset is, for people, and where its files lie, for `load_dataset`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from infra.storage import StorageFolder, write_durable
from infra.yaml_text import as_yaml
from operators.export.config import Contents
from operators.export.folder import DATA, ExportPart, read_contents, read_parts
from operators.export.views import view_of


def write_card(root: StorageFolder) -> None:
    """Write `root`/README.md as the folder stands. Raises ExportError where it is no export."""
    write_durable(root / "README.md", card(read_contents(root), read_parts(root)))


def _for_loading(contents: Contents) -> dict[str, Any]:
    """What `load_dataset` reads: files and their columns; so it takes files of older releases, which lack some."""
    said: dict[str, Any] = {
        "configs": [{"config_name": "default", "data_files": f"{DATA}/*.{contents.format}"}],
        "tags": ["reinforcement-learning", "laminar"],
    }
    if contents.format != "jsonl":  # whose reader makes its own mind up
        said["dataset_info"] = {"features": [_feature(field) for field in contents.schema]}
    return said


def _feature(field: pa.Field) -> dict[str, Any]:
    return {"name": field.name, **_typed(field.type)}


def _typed(kind: pa.DataType) -> dict[str, Any]:
    if pa.types.is_struct(kind):
        return {"struct": [_feature(field) for field in kind]}
    if pa.types.is_list(kind):
        inner = _typed(kind.value_type)
        return {"list": next(iter(inner.values())) if inner.keys() <= {"dtype", "struct"} else inner}
    return {"dtype": {"double": "float64", "float": "float32"}.get(str(kind), str(kind))}


def card(contents: Contents, parts: Sequence[ExportPart]) -> str:
    """The card of an export that has `parts`."""
    view = view_of(contents.of, contents.view)
    conditions = [condition for condition in (view.condition, contents.where) if condition]
    columns = [f"| `{field.name}` | `{field.type}` |" for field in contents.schema]
    return "\n".join(
        [
            "---",
            as_yaml(_for_loading(contents)).strip(),
            "---",
            f"# {contents.topic} of {contents.run}",
            "",
            f"View `{contents.view}`: {view.about}. Exported by Laminar from the Kafka topic "
            f"`{contents.of.name(contents.run)}`: {sum(part.rows for part in parts):,} rows in "
            f"{sum(bool(part.file) for part in parts)} files.",
            *(["", f"Rows for which `{'` and `'.join(conditions)}` holds."] if conditions else []),
            "",
            "A file's name says which offsets of which partition it holds; `laminar export verify` proves that none is "
            "missing or there twice. Columns are added in later versions and never change.",
            "",
            "| column | type |",
            "| --- | --- |",
            *columns,
            "",
        ]
    )
