"""Encodings change only with the schema version: golden files hold the fields and an encoded sample."""

from __future__ import annotations

import base64
import json

import pytest
from golden_files import FOLDER, field_lines, path_of
from record_samples import SAMPLES

from schemas.codec import RECORD_TYPES, RecordType, decode, encode

HOW_TO_CHANGE = (
    "{schema} differs from its golden file. If this is intended, raise the version of the record in schemas/codec.py "
    "and run `python tests/schemas/golden_files.py`. Readers of the old version are still in use."
)
EACH_TYPE = pytest.mark.parametrize("entry", RECORD_TYPES, ids=lambda entry: entry.schema)


def golden(entry: RecordType) -> dict:
    path = path_of(entry)
    assert path.exists(), f"{path} is missing: run `python tests/schemas/golden_files.py`"
    return json.loads(path.read_text())


@EACH_TYPE
def test_record_fields_match_golden_file(entry: RecordType) -> None:
    assert golden(entry)["fields"] == list(field_lines(entry.kind)), HOW_TO_CHANGE.format(schema=entry.schema)
    assert golden(entry)["encoding"] == entry.encoding, HOW_TO_CHANGE.format(schema=entry.schema)


@EACH_TYPE
def test_golden_value_decodes_to_sample(entry: RecordType) -> None:
    stored = golden(entry)
    headers = [(name, text.encode()) for name, text in stored["headers"].items()]
    assert decode(base64.b64decode(stored["value"]), headers) == [SAMPLES[entry.kind]]


@EACH_TYPE
def test_sample_encodes_to_golden_value(entry: RecordType) -> None:
    stored = golden(entry)
    value, headers = encode(SAMPLES[entry.kind])
    assert {name: text.decode() for name, text in headers} == stored["headers"]
    if entry.encoding == "json":  # Arrow may change the layout of the same batch
        assert value == base64.b64decode(stored["value"]), HOW_TO_CHANGE.format(schema=entry.schema)


def test_every_golden_file_has_a_record() -> None:
    known = {entry.kind.__name__: entry.version for entry in RECORD_TYPES}
    for path in FOLDER.iterdir():
        name, _, version = path.stem.partition("-")
        assert 1 <= int(version) <= known.get(name, 0), f"{path.name}: no such record, or its version was lowered"
