"""Many values decoded together are what each is alone: the same rows, or the same reason."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest
from record_samples import SAMPLES

from schemas.arrow import arrow_schema
from schemas.block import Block
from schemas.codec import Headers, UndecodableRecord, decode_all, decode_as_block, encode
from schemas.records import Experience, Settled

Raw = tuple[bytes | None, Headers]


def patched(kind: type, column: str, value: object) -> Raw:
    """A sample with `value` in `column`, as a writer without our checks would send it."""
    encoded, headers = encode(SAMPLES[kind])
    batch = pa.ipc.read_record_batch(pa.py_buffer(encoded), arrow_schema(kind))
    place = batch.schema.get_field_index(column)
    field = batch.schema.field(place)
    return batch.set_column(place, field, pa.array([value], field.type)).serialize().to_pybytes(), headers


SOUND: list[Raw] = [encode(SAMPLES[kind]) for kind in SAMPLES]
BROKEN: list[Raw] = [
    (None, ()),
    (b"x", ()),
    (b"x", (("laminar-schema", b"Settled/9"),)),
    (encode(SAMPLES[Settled])[0][:30], encode(SAMPLES[Settled])[1]),
    (b"{", encode(next(r for r in SAMPLES.values() if type(r).__name__ == "Metric"))[1]),
    patched(Settled, "fate", "lost"),
    patched(Settled, "reason", None),
    patched(Experience, "reward", float("nan")),
]


def alone(raw: Raw) -> object:
    try:
        return decode_as_block(*raw).records()
    except UndecodableRecord as error:
        return str(error)


def together(raws: list[Raw]) -> list[object]:
    return [each.records() if isinstance(each, Block) else str(each) for each in decode_all(raws)]


@pytest.mark.parametrize(
    "raws", [[], SOUND, BROKEN, [*SOUND, *BROKEN, *SOUND]], ids=["none", "sound", "broken", "both"]
)
def test_together_as_alone(raws: list[Raw]) -> None:
    assert together(raws) == [alone(raw) for raw in raws]


def test_they_keep_their_order() -> None:
    rows = [replace(SAMPLES[Settled], tokens=number) for number in range(50)]  # type: ignore[type-var]
    assert together([encode(row) for row in rows]) == [[row] for row in rows]
