"""Questions in Parquet files or a Hugging Face dataset folder, with random access through memory-mapped Arrow."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from infra.arrow_files import DAMAGE, checked, open_parquet_file
from infra.json_text import decode_json
from infra.name_lookup import suggest_name
from operators.prompts.config import MAX_SUGGESTIONS, TaskConfig
from operators.prompts.layouts import ANSWER_COLUMNS, PROMPT_COLUMNS, ConditionColumns, question_of, top_columns
from operators.prompts.question import BadRow, Question, SourceError, UnusableRow

_SCAN_ROWS = 256
_SPLIT = re.compile(r"(?:^|[-_./])(train|test|validation|valid|val|dev)(?=[-_./]|$)")


class ArrowRows:
    """The rows of files with the same columns. Raises SourceError if they cannot be read as one table.

    Arrow files are mapped. Parquet has no cheap random access, so the needed columns are first copied, uncompressed,
    into an unnamed Arrow file in the temporary folder, which the kernel removes with the process.
    """

    def __init__(self, name: str, files: Sequence[Path], config: TaskConfig) -> None:
        self.name = name
        self._config, self._task = config, config.row_task
        try:
            tables = [checked(_table(path, config), path) for path in files]
            self._table = pa.concat_tables(tables, promote_options="default")
        except SourceError:
            raise
        except DAMAGE as error:
            raise SourceError(f"cannot read {name}: {error}") from error

    def scan(self) -> Iterator[Question | BadRow]:
        """Every row in order. Raises SourceError at the end if no row has a field of `where` or `levels`."""
        columns, row = ConditionColumns(self._config), 0
        for batch in self._table.to_batches(max_chunksize=_SCAN_ROWS):
            for value in batch.to_pylist():
                columns.record(value)
                try:
                    yield question_of(value, row, self._config, self._task)
                except UnusableRow as error:
                    yield error.at(row + 1)
                row += 1
        columns.check(self.name)

    def question(self, row: int) -> Question:
        """The question in row `row`."""
        return question_of(self._table.slice(row, 1).to_pylist()[0], row, self._config, self._task)

    def close(self) -> None:
        """Nothing to do: maps close with the table."""


def open_parquet(path: Path, config: TaskConfig) -> ArrowRows:
    """The rows of one Parquet file. Raises SourceError."""
    if not path.is_file():
        raise SourceError(f"no file {path}" + (" (a folder is source = 'dataset')" if path.is_dir() else ""))
    return ArrowRows(str(path), [path], config)


def open_dataset(path: Path, config: TaskConfig) -> ArrowRows:
    """The rows of split `config.split` of a Hugging Face dataset folder. Raises SourceError.

    Layouts: `save_to_disk` of a dataset (state.json) or of a dictionary of splits (dataset_dict.json), and folders of
    Parquet or Arrow files whose names contain the split, as on the hub; if no name contains one, all files are read.
    """
    if not path.is_dir():
        raise SourceError(f"no folder {path}")
    folder = path
    if (path / "dataset_dict.json").is_file():
        splits = _json(path / "dataset_dict.json").get("splits", [])
        if not isinstance(splits, list) or not all(isinstance(each, str) for each in splits):
            raise SourceError(f"{path / 'dataset_dict.json'} has no list of names as splits")
        if config.split not in splits:
            raise SourceError(
                f"{path} has no split {config.split!r}{suggest_name(config.split, splits, MAX_SUGGESTIONS)}"
            )
        folder = path / config.split
    if (folder / "state.json").is_file():
        return ArrowRows(str(folder), _saved_files(folder), config)
    return ArrowRows(str(path), _split_files(folder, config.split), config)


def _saved_files(folder: Path) -> list[Path]:
    state = _json(folder / "state.json")
    if state.get("_indices_data_files"):
        raise SourceError(f"{folder} contains an indices mapping: call flatten_indices() and save it again")
    try:
        files = [str(entry["filename"]) for entry in state.get("_data_files", [])]
    except (TypeError, KeyError) as error:
        raise SourceError(f"{folder / 'state.json'} has invalid data files: {error!r}") from error
    if not files:
        raise SourceError(f"{folder / 'state.json'} names no data files")
    if foreign := [name for name in files if Path(name).name != name or name in ("", "..")]:
        raise SourceError(f"{folder / 'state.json'} names a file outside of its folder: {foreign[0][:80]!r}")
    return [folder / name for name in files]


def _split_files(folder: Path, split: str) -> list[Path]:
    files = sorted(p for kind in ("parquet", "arrow") for p in folder.rglob(f"*.{kind}") if not p.name.startswith("."))
    if not files:
        raise SourceError(f"{folder} contains no .parquet or .arrow files")
    named = {path: _SPLIT.findall(str(path.relative_to(folder).with_suffix(""))) for path in files}
    chosen = [path for path in files if split in named[path] or split in path.relative_to(folder).parts[:-1]]
    if chosen:
        return chosen
    known = sorted({name for names in named.values() for name in names})
    if known:
        raise SourceError(f"{folder} has no split {split!r}{suggest_name(split, known, MAX_SUGGESTIONS)}")
    return files


def _table(path: Path, config: TaskConfig) -> pa.Table:
    if path.suffix == ".parquet":
        return _copy_to_arrow(path, config)
    mapped = pa.memory_map(str(path))
    try:  # `datasets` writes the stream format; others write the file format under the same suffix
        table = pa.ipc.open_stream(mapped).read_all()
    except pa.ArrowInvalid:
        mapped.seek(0)
        table = pa.ipc.open_file(mapped).read_all()
    return table.select(_columns(path, table.column_names, config))


def _copy_to_arrow(path: Path, config: TaskConfig) -> pa.Table:
    with open_parquet_file(path) as parquet:
        names = _columns(path, parquet.schema_arrow.names, config)
        schema = pa.schema([parquet.schema_arrow.field(name) for name in names])
        # The map outlives the name, so the kernel removes the file with its last reader, even after SIGKILL.
        with tempfile.NamedTemporaryFile(prefix="laminar-prompts-") as copy:
            with pa.ipc.new_stream(copy.name, schema) as writer:
                for batch in parquet.iter_batches(batch_size=1024, columns=names):
                    writer.write_batch(batch)
            return pa.ipc.open_stream(pa.memory_map(copy.name)).read_all()


def _columns(path: Path, names: Sequence[str], config: TaskConfig) -> list[str]:
    """The columns of `names` to read. Raises SourceError, once for the file, if a needed column is missing."""
    needed = [("prompt_column", (config.prompt_column,) if config.prompt_column else PROMPT_COLUMNS)]
    if config.answer_required:
        needed.append(("answer_column", (config.answer_column,) if config.answer_column else ANSWER_COLUMNS))
    for name in config.reference_columns:
        needed.append(("extra_columns" if name in config.extra_columns else "where", (name,)))
    for option, wanted in needed:
        if not any(name in names or name.partition(".")[0] in names for name in wanted):
            missing = f"no column {' or '.join(wanted)}, only {', '.join(names)}; set prompts.{option}"
            raise SourceError(f"{path} has {missing}", missing)
    return [name for name in names if name in top_columns(config)]


def _json(path: Path) -> dict[str, Any]:
    try:
        value = decode_json(path.read_bytes())
    except ValueError as error:
        raise SourceError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise SourceError(f"{path} is not a JSON object")
    return value
