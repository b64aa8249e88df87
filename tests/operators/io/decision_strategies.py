"""Any decisions of placement and hand-overs, for properties of the re-partitioning."""

from __future__ import annotations

from decisions import kv, moved, placed
from hypothesis import strategies as st

from schemas.codec import MAX_VALUE_BYTES
from schemas.records import Cancel

LIVE = {0: 1, 1: 3, 2: 2}
SIZES = st.sampled_from([0, 3, MAX_VALUE_BYTES // 25, MAX_VALUE_BYTES // 9])
PLACED = st.builds(
    placed,
    number=st.integers(0, 3),
    replica=st.integers(0, 3),
    lease=st.integers(1, 9),
    incarnation=st.integers(1, 3),
    tokens=SIZES,
    kv=st.none() | st.builds(kv, st.sampled_from([1, MAX_VALUE_BYTES // 8])),
)
CANCELS = st.builds(Cancel, st.just(("p0.0",)), st.just((1,)), st.integers(0, 3), st.integers(1, 3))
MOVES = st.builds(moved, st.just("p0.0"), source=st.integers(0, 3), incarnation=st.integers(1, 3))
DECISIONS = st.lists(PLACED | CANCELS | MOVES, max_size=12)
