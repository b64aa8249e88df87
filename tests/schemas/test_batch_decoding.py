"""Decoding many values together gives the same rows and errors as decoding each one."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from record_samples import SAMPLES
from record_strategies import records_of

from schemas.arrow import arrow_schema
from schemas.block import Block
from schemas.block_codec import decode_all, decode_as_block
from schemas.codec import RECORD_TYPES, Headers, UndecodableRecord, encode
from schemas.records import DeadLetter, Experience, MicroBatch, Settled
from schemas.stack import MIN_STACKED, read_stacked

Raw = tuple[bytes | None, Headers]


def patched(kind: type, column: str, value: object) -> Raw:
    """A sample with `value` in `column`, as a writer without checks would send it."""
    encoded, headers = encode(SAMPLES[kind])
    batch = pa.ipc.read_record_batch(pa.py_buffer(encoded), arrow_schema(kind))
    index = batch.schema.get_field_index(column)
    field = batch.schema.field(index)
    return batch.set_column(index, field, pa.array([value], field.type)).serialize().to_pybytes(), headers


VALID: list[Raw] = [encode(SAMPLES[kind]) for kind in SAMPLES]
INVALID: list[Raw] = [
    (None, ()),
    (b"x", ()),
    (b"x", (("laminar-schema", b"Settled/9"),)),
    (encode(SAMPLES[Settled])[0][:30], encode(SAMPLES[Settled])[1]),
    (b"{", encode(next(r for r in SAMPLES.values() if type(r).__name__ == "Metric"))[1]),
    patched(Settled, "outcome", "lost"),
    patched(Settled, "reason", None),
    patched(Experience, "reward", float("nan")),
]


def decode_one(raw: Raw) -> str:
    try:
        return as_text(decode_as_block(*raw))
    except UndecodableRecord as error:
        return str(error)


def decode_together(raws: list[Raw]) -> list[str]:
    found = decode_all([value for value, _ in raws], [headers for _, headers in raws]).per_value()
    return [as_text(each) if isinstance(each, Block) else each for each in found]


def as_text(block: Block) -> str:
    """`block` as text, so that NaN equals itself."""
    return f"{block.kind.__name__}: {block.batch.to_pylist()}"


@pytest.mark.parametrize(
    "raws", [[], VALID, INVALID, [*VALID, *INVALID, *VALID]], ids=["none", "valid", "invalid", "both"]
)
def test_decode_all_matches_single_decoding(raws: list[Raw]) -> None:
    assert decode_together(raws) == [decode_one(raw) for raw in raws]


def test_decode_all_keeps_order() -> None:
    rows = [replace(SAMPLES[Settled], tokens=number) for number in range(50)]  # type: ignore[type-var]
    assert decode_together([encode(row) for row in rows]) == [as_text(Block.of([row])) for row in rows]


ARROW_KINDS = pytest.mark.parametrize(
    "kind", [entry.kind for entry in RECORD_TYPES if entry.encoding == "arrow"], ids=lambda kind: kind.__name__
)


@ARROW_KINDS
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_decode_all_matches_single_decoding_for_few_layouts(kind: type, data: st.DataObject) -> None:
    max_rows = 1 if kind in (MicroBatch, DeadLetter) else 3
    several = st.lists(records_of(kind), min_size=1, max_size=max_rows)
    raws = [encode(*rows) for rows in data.draw(st.lists(several, min_size=1, max_size=3))]
    many = [raws[at] for at in data.draw(st.permutations([*range(len(raws))] * MIN_STACKED))]
    assert decode_together(many) == [decode_one(raw) for raw in many]


@ARROW_KINDS
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_decode_all_matches_single_decoding_of_damaged_values(kind: type, data: st.DataObject) -> None:
    """The values differ only after their metadata: in numbers, offsets, characters and nulls."""
    value, headers = encode(SAMPLES[kind])
    body = 8 + int.from_bytes(value[4:8], "little")
    many = []
    for _ in range(MIN_STACKED):
        damaged = bytearray(value)
        for at in data.draw(st.lists(st.integers(body, len(value) - 1), max_size=2)):
            damaged[at] ^= 1 << data.draw(st.integers(0, 7))
        many.append((bytes(damaged), headers))
    assert decode_together(many) == [decode_one(raw) for raw in many]


def test_read_stacked_reads_once_per_layout() -> None:
    reads = []

    def read(value: bytes) -> pa.RecordBatch:
        reads.append(value)
        return pa.ipc.read_record_batch(pa.py_buffer(value), arrow_schema(Settled))

    rows = [replace(SAMPLES[Settled], trajectory_id=f"p{number}.0") for number in range(1000)]  # type: ignore[type-var]
    batch, counts = read_stacked(arrow_schema(Settled), [encode(row)[0] for row in rows], read)
    assert batch.column("trajectory_id").to_pylist() == [row.trajectory_id for row in rows]
    assert counts == [1] * 1000
    assert len(reads) == 3  # ids of four, five and six characters
