"""The dataset card: a description for people, and the metadata for `load_dataset`."""

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
    """Write `root`/README.md for the present contents of the folder. Raises ExportError if it is not an export."""
    write_durable(root / "README.md", card(read_contents(root), read_parts(root)))


def _metadata(contents: Contents) -> dict[str, Any]:
    """The metadata for `load_dataset`: files and columns, so that it also reads files without the newest columns."""
    files = f"{DATA}/*.{contents.format}"
    data_files: Any = [{"split": "test", "path": files}] if contents.split == "test" else files
    metadata: dict[str, Any] = {
        "configs": [{"config_name": "default", "data_files": data_files}],
        "tags": ["reinforcement-learning", "laminar"],
    }
    if contents.format != "jsonl":  # its reader infers the types
        metadata["dataset_info"] = {"features": [_feature(field) for field in contents.schema]}
    return metadata


def _feature(field: pa.Field) -> dict[str, Any]:
    return {"name": field.name, **_feature_type(field.type)}


def _feature_type(kind: pa.DataType) -> dict[str, Any]:
    if pa.types.is_struct(kind):
        return {"struct": [_feature(field) for field in kind]}
    if pa.types.is_list(kind):
        inner = _feature_type(kind.value_type)
        return {"list": next(iter(inner.values())) if inner.keys() <= {"dtype", "struct"} else inner}
    return {"dtype": {"double": "float64", "float": "float32"}.get(str(kind), str(kind))}


def card(contents: Contents, parts: Sequence[ExportPart]) -> str:
    """The card of an export of `contents` with `parts`."""
    view = view_of(contents.source, contents.view, contents.messages)
    conditions = contents.conditions
    columns = [f"| `{field.name}` | `{field.type}` |" for field in contents.schema]
    return "\n".join(
        [
            "---",
            as_yaml(_metadata(contents)).strip(),
            "---",
            f"# {contents.topic} of {contents.run}",
            "",
            f"View `{contents.view}`: {view.description}. Exported by Laminar from the Kafka topic "
            f"`{contents.source.name(contents.run)}`: {sum(part.rows for part in parts):,} rows in "
            f"{sum(bool(part.file) for part in parts)} files.",
            *(["", f"Rows for which `{'` and `'.join(conditions)}` holds."] if conditions else []),
            "",
            "The name of a file states its partition and offsets; `laminar export verify` checks that no offset is "
            "missing or duplicated. Later versions add columns and never change them.",
            "",
            "| column | type |",
            "| --- | --- |",
            *columns,
            "",
        ]
    )
