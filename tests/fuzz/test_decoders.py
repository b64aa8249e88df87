"""Decoders accept or reject any bytes from outside a process: no other exception, no hang."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from decoders import DECODERS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from operators.export.formats import Format, read_table, write_table
from operators.prompts.arrow_rows import open_dataset
from operators.prompts.config import TaskConfig
from operators.prompts.question import SourceError

EXAMPLES = 80
_EDITS = st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(max_size=9), st.integers(0, 9)), max_size=4)


@pytest.mark.parametrize("name", DECODERS)
def test_decoder_accepts_or_rejects_truncated_seeds(name: str) -> None:
    decoder = DECODERS[name]
    for seed in decoder.seeds():
        for end in {0, 1, 2, len(seed) // 2, max(0, len(seed) - 1), len(seed)}:
            decoder.check(seed[:end])


@pytest.mark.parametrize("number", [b"1e999", b"9" * 30, b"-1", b"0.5", b"null"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoder_accepts_or_rejects_any_number(name: str, number: bytes) -> None:
    """Infinite and very large numbers raise OverflowError where nobody expects it."""
    decoder = DECODERS[name]
    for seed in decoder.seeds():
        for found in list(re.finditer(rb"(?<=[:\[, ])-?\d+(?:\.\d+)?", seed))[:40]:
            decoder.check(seed[: found.start()] + number + seed[found.end() :])


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_read_table_rejects_other_column_types(kind: Format, tmp_path: Path) -> None:
    write_table(tmp_path / "it", pa.table({"reward": ["high"]}), kind)
    with pytest.raises(ValueError, match="columns of other types than its topic"):
        read_table(tmp_path / "it", kind, pa.schema([("reward", pa.float64())]))


def texts_outside_of_their_data(kind: Format, file: Path) -> None:
    """An Arrow file whose second text begins before the first one, and ends 1 GB after the data."""
    texts = pa.array(["question-a", "question-b"])
    table = pa.table({"task": texts, "question": texts, "answer": texts})
    opened = pa.ipc.new_file(file, table.schema) if kind == "arrow" else pa.ipc.new_stream(file, table.schema)
    with opened as writer:
        writer.write_table(table)
    right, wrong = (np.array(offsets, np.int32).tobytes() for offsets in ([0, 10, 20], [0, -(1 << 20), 1 << 30]))
    assert file.read_bytes().count(right) == 3
    file.write_bytes(file.read_bytes().replace(right, wrong))


def test_read_table_never_reads_beyond_the_data_of_a_file(tmp_path: Path) -> None:
    """Its hash in the manifest is right: whoever made the file made the manifest."""
    texts_outside_of_their_data("arrow", tmp_path / "it")
    with pytest.raises(ValueError, match="cannot be read as arrow"):
        read_table(tmp_path / "it", "arrow", pa.schema([("task", pa.utf8())]))


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_read_table_rejects_more_rows_than_a_file_can_have(kind: Format, tmp_path: Path) -> None:
    """A column without values needs no bytes: a gigarow of it took 8 GB of memory for a file of 400 bytes."""
    write_table(tmp_path / "it", pa.table({"x": pa.nulls(1 << 22)}), kind)
    with pytest.raises(ValueError, match=r"cannot be read as .*: 4194304 rows in \d+ bytes"):
        read_table(tmp_path / "it", kind, pa.schema([("reward", pa.float64())]))


def test_dataset_never_reads_beyond_the_data_of_a_file(tmp_path: Path) -> None:
    texts_outside_of_their_data("parquet", tmp_path / "train.arrow")
    with pytest.raises(SourceError, match="cannot read"):
        open_dataset(tmp_path, TaskConfig(source="dataset", path=str(tmp_path)))


@pytest.mark.parametrize("name", ["../../train.arrow", "/etc/passwd", "folder/train.arrow", 5, None])
def test_dataset_rejects_data_files_outside_of_its_folder(name: object, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(SourceError, match=r"state\.json names a file outside of its folder|cannot read"):
        open_dataset(tmp_path, TaskConfig(source="dataset", path=str(tmp_path)))


@pytest.mark.parametrize("name", DECODERS)
def test_decoder_accepts_or_rejects_any_bytes(name: str) -> None:
    decoder = DECODERS[name]
    seeds = decoder.seeds()

    @settings(max_examples=EXAMPLES, deadline=timedelta(seconds=20), suppress_health_check=list(HealthCheck))
    @given(seed=st.sampled_from([b"", *seeds]), edits=_EDITS, tail=st.binary(max_size=40))
    def feed(seed: bytes, edits: list[tuple[int, bytes, int]], tail: bytes) -> None:
        data = bytearray(seed)
        for at, put, gone in edits:
            place = at % (len(data) + 1)
            data[place : place + gone] = put
        decoder.check(bytes(data) + tail)

    feed()
