"""Decoders accept or reject any bytes from outside a process: no other exception, no hang."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from decoders import DECODERS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from operators.export.formats import Format, read_table, write_table

EXAMPLES = 80
_EDITS = st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(max_size=9), st.integers(0, 9)), max_size=4)


@pytest.mark.parametrize("name", DECODERS)
def test_decoder_accepts_or_rejects_truncated_seeds(name: str) -> None:
    decoder = DECODERS[name]
    for seed in decoder.seeds():
        for end in {0, 1, 2, len(seed) // 2, max(0, len(seed) - 1), len(seed)}:
            decoder.check(seed[:end])


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_read_table_rejects_other_column_types(kind: Format, tmp_path: Path) -> None:
    write_table(tmp_path / "it", pa.table({"reward": ["high"]}), kind)
    with pytest.raises(ValueError, match="columns of other types than its topic"):
        read_table(tmp_path / "it", kind, pa.schema([("reward", pa.float64())]))


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
