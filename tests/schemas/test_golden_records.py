"""What travels changes only with its schema version: fields and samples stand in golden files."""

from __future__ import annotations

import base64
import json

import pytest
from golden_files import FOLDER, field_lines, path_of
from record_samples import SAMPLES

from schemas.codec import RECORD_TYPES, RecordType, decode, encode

HOW_TO_CHANGE = (
    "{schema} no longer is what its golden file says. If that is meant: raise the version of the record in "
    "schemas/codec.py and run `python tests/schemas/golden_files.py`. Readers of the old version are still out there."
)
EACH = pytest.mark.parametrize("entry", RECORD_TYPES, ids=lambda entry: entry.schema)


def golden(entry: RecordType) -> dict:
    path = path_of(entry)
    assert path.exists(), f"{path} is missing: run `python tests/schemas/golden_files.py`"
    return json.loads(path.read_text())


@EACH
def test_fields_are_those_of_the_version(entry: RecordType) -> None:
    assert golden(entry)["fields"] == list(field_lines(entry.kind)), HOW_TO_CHANGE.format(schema=entry.schema)
    assert golden(entry)["encoding"] == entry.encoding, HOW_TO_CHANGE.format(schema=entry.schema)


@EACH
def test_what_was_written_once_is_read_for_ever(entry: RecordType) -> None:
    stored = golden(entry)
    headers = [(name, text.encode()) for name, text in stored["headers"].items()]
    assert decode(base64.b64decode(stored["value"]), headers) == [SAMPLES[entry.kind]]


@EACH
def test_headers_and_json_are_written_as_before(entry: RecordType) -> None:
    stored = golden(entry)
    value, headers = encode(SAMPLES[entry.kind])
    assert {name: text.decode() for name, text in headers} == stored["headers"]
    if entry.encoding == "json":  # Arrow may lay the same batch out anew
        assert value == base64.b64decode(stored["value"]), HOW_TO_CHANGE.format(schema=entry.schema)


def test_every_golden_file_has_its_record() -> None:
    known = {entry.kind.__name__: entry.version for entry in RECORD_TYPES}
    for path in FOLDER.iterdir():
        name, _, version = path.stem.partition("-")
        assert 1 <= int(version) <= known.get(name, 0), f"{path.name}: no such record, or the version went back"
