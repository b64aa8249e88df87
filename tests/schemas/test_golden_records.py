"""Encodings change only with the schema version: golden files hold the fields and an encoded sample."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pytest
from golden_files import FOLDER, field_lines, path_of
from record_samples import SAMPLES

from schemas.block_codec import decode_all
from schemas.codec import (
    RECORD_TYPES,
    Headers,
    RecordType,
    UndecodableRecord,
    as_version,
    decode,
    encode,
    versions_of,
)
from schemas.plain import to_plain
from schemas.record_versions import ADDED
from schemas.records import RankAddress, RelayChain, RelayStatus, Release, ReplicaStatus

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


EARLIER = [
    *("Prompt-2", "Assignment-2", "Trajectory-2", "Experience-2"),
    *("Assignment-3", "Trajectory-3", "Experience-3", "MicroBatch-2", "EpisodeEnd-2"),
    *("Trajectory-4", "Experience-4", "MicroBatch-3", "EpisodeEnd-3", "StageStatus-2", "TurnRequest-2"),
    *("Trajectory-5", "Experience-6"),
]


def earlier(name: str) -> tuple[bytes, Headers]:
    """The golden value and headers of an earlier version."""
    stored = json.loads((FOLDER / f"{name}.json").read_text())
    return base64.b64decode(stored["value"]), tuple((key, text.encode()) for key, text in stored["headers"].items())


def sample_of(name: str) -> dict[str, Any]:
    """The sample of an earlier version: without what that version lacks."""
    class_name, _, number = name.partition("-")
    (kind,) = (entry.kind for entry in RECORD_TYPES if entry.kind.__name__ == class_name)
    expected = to_plain(SAMPLES[kind])
    trajectory = expected.get("trajectory", expected)
    if number == "2" and class_name in ("Prompt", "Assignment", "Trajectory", "Experience"):
        trajectory.get("prompt", trajectory)["messages"] = []
    if "conversations" in trajectory:
        trajectory["conversations"] = [] if number in "23" else trajectory["conversations"]
        trajectory["conversation_rewards"] = [] if number in "234" else trajectory["conversation_rewards"]
        trajectory["token_sampler"] = None
    if class_name == "Experience" and number in "234":
        expected["conversation_rewards"] = []
    if class_name == "Assignment":
        expected["at_least"] = None
    if class_name == "MicroBatch":
        expected["breaks"] = [] if number == "2" else expected["breaks"]
        expected["context_rewards"] = []
    if class_name == "StageStatus":
        expected["forming"] = expected["gone"] = None
    if class_name == "TurnRequest":
        expected["rewritten"] = None
    if class_name == "EpisodeEnd":
        expected["rewards"] = None
        if number == "2":
            expected["branches"] = expected["messages"] = None
    return expected


@pytest.mark.parametrize("name", EARLIER)
def test_record_of_an_earlier_version_lacks_what_was_added(name: str) -> None:
    expected = sample_of(name)
    (kind,) = (entry.kind for entry in RECORD_TYPES if entry.kind.__name__ == name.partition("-")[0])
    assert [to_plain(row) for row in decode(*earlier(name))] == [expected]
    newest = encode(SAMPLES[kind])
    values, headers = zip(earlier(name), newest, earlier(name), earlier(name), strict=True)
    rows = decode_all(values, headers).blocks[kind].records()
    assert [to_plain(row) for row in rows] == [expected, to_plain(SAMPLES[kind]), expected, expected]


@pytest.mark.parametrize("name", EARLIER)
def test_damaged_record_of_an_earlier_version_is_undecodable(name: str) -> None:
    value, headers = earlier(name)
    for damaged in (b"", b"\xff" * 3000, value[: len(value) // 2]):
        with pytest.raises(UndecodableRecord):
            decode(damaged, headers)


JSON_ADDED = [
    *((RelayChain, 2), (RankAddress, 2), (RelayStatus, 2), (Release, 2)),
    *((ReplicaStatus, 2), (ReplicaStatus, 3), (ReplicaStatus, 4)),
]


@pytest.mark.parametrize(("kind", "version"), JSON_ADDED)
def test_json_record_of_an_earlier_version_lacks_fields(kind: type, version: int) -> None:
    value, headers = earlier(f"{kind.__name__}-{version}")
    (found,) = decode(value, headers)
    added = ADDED[kind][version - 2 :]
    assert found == replace(SAMPLES[kind], **{each: kind.__dataclass_fields__[each].default for each in added})
    values, all_headers = zip((value, headers), encode(found), strict=True)
    assert list(decode_all(values, all_headers).blocks[kind].records()) == [found, found]
    for damaged in (b"", b"[]", value[:-2], f'{{"{added[0]}":[]}}'.encode()):
        with pytest.raises(UndecodableRecord):
            decode(damaged, headers)


def test_every_golden_file_has_a_record() -> None:
    known = {entry.kind.__name__: entry.version for entry in RECORD_TYPES}
    for path in FOLDER.iterdir():
        name, _, version = path.stem.partition("-")
        assert 1 <= int(version) <= known.get(name, 0), f"{path.name}: no such record, or its version was lowered"


OPTIONAL = ("EpisodeEnd", "StageStatus", "TurnRequest")
"""Records whose earlier versions lack optional fields only."""


@pytest.mark.parametrize("name", [name for name in EARLIER if not name.startswith(OPTIONAL)])
def test_as_version_writes_what_an_earlier_release_wrote(name: str) -> None:
    value, headers = earlier(name)
    (record,) = decode(value, headers)
    written, its = as_version(*encode(record), int(name.partition("-")[2]))
    assert dict(its) == dict(headers)
    assert decode(written, its) == [record]
    assert len(written) < len(encode(record)[0])


def test_as_version_writes_json_without_the_field() -> None:
    chain = replace(SAMPLES[RelayChain], needed=())
    written, headers = as_version(*encode(chain), 2)
    assert dict(headers)["laminar-schema"] == b"RelayChain/2"
    assert "needed" not in json.loads(written)
    assert decode(written, headers) == [chain]


@EACH_TYPE
def test_as_version_changes_no_record_with_a_newer_field(entry: RecordType) -> None:
    value, headers = encode(SAMPLES[entry.kind])
    versions = versions_of(entry.schema)
    assert versions[-1] == entry.version
    assert as_version(value, headers, entry.version) == (value, headers)
    assert {as_version(value, headers, version)[0] for version in versions} == {value}
