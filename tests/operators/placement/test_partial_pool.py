"""PartialPool: it equals what replicas hold under any order, repetition or loss of records, owners and leases."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_harness import response
from record_factories import version

from operators.io.partial_pool import PartialPool, PooledPartial, cut_spans, join_spans
from schemas.records import Progress, VersionSpan

NAMES = ("p0.0", "p0.1", "p7.3")


def progress(tokens: list[int], start: int, lease: int, name: str = "p0.0", number: int = 0) -> Progress:
    spans = (VersionSpan(version(number), len(tokens)),) if tokens else ()
    return Progress(name, lease, 1, 0, 1, start, response(tokens), spans, None, None, 0)


def held(pool: PartialPool, name: str = "p0.0") -> list[int]:
    partial = pool.get(name)
    return [] if partial is None else partial.response.token_ids.to_pylist()


@dataclass
class Holder:
    """A replica with one trajectory: its tokens, and how many of them it has reported."""

    lease: int
    tokens: list[int]
    reported: int


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "report", "report", "again", "lose", "move", "zombie"]),
        st.sampled_from(NAMES),
        st.integers(1, 4),
    ),
    max_size=60,
)


@given(OPERATIONS, st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_pool_equals_what_the_replica_holds(operations: list[tuple[str, str, int]], rng) -> None:
    """Owners step, report, are lost and hand over; records are repeated, and former owners continue to report."""
    pool, lease = PartialPool(), len(NAMES)
    holders = {name: Holder(i, [], 0) for i, name in enumerate(NAMES)}
    log: list[Progress] = []
    zombies: list[tuple[str, Holder]] = []

    def report(name: str, holder: Holder) -> Progress:
        record = progress(holder.tokens[holder.reported :], holder.reported, holder.lease, name)
        holder.reported = len(holder.tokens)
        return record

    for what, name, size in operations:
        holder = holders[name]
        if what == "step":
            holder.tokens += [rng.randrange(100) for _ in range(size)]
        elif what == "report":
            log.append(report(name, holder))
            assert pool.fold(log[-1])
        elif what == "again" and log:
            assert pool.fold(rng.choice(log))  # repeated at any later time
        elif what == "lose":
            zombies.append((name, replace(holder, tokens=list(holder.tokens))))
            lease += 1
            partial = pool.get(name)
            pool.start_lease(name, lease, partial)
            kept = [] if partial is None else partial.response.token_ids.to_pylist()
            holders[name] = Holder(lease, kept, len(kept))
        elif what == "move":
            log.append(report(name, holder))
            assert pool.fold(log[-1])
            zombies.append((name, replace(holder, tokens=list(holder.tokens))))
            lease += 1
            pool.hand_over(name, lease)
            holders[name] = replace(holder, lease=lease, tokens=list(holder.tokens))
        elif what == "zombie" and zombies:
            whose, zombie = rng.choice(zombies)
            zombie.tokens += [rng.randrange(100, 200) for _ in range(size)]
            pool.fold(report(whose, zombie))  # its own tokens and gaps have no effect
    for name, holder in holders.items():
        assert held(pool, name) == holder.tokens[: holder.reported]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(0, 7), st.data())
@settings(max_examples=150, deadline=None)
def test_pool_detects_a_missing_record(sizes: list[int], gone: int, data) -> None:
    tokens = list(range(sum(sizes)))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    pool, folded = PartialPool(), []
    for i, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        if i != gone:
            folded.append(pool.fold(progress(tokens[start : start + size], start, 1)))
    if gone >= len(sizes) - 1:
        assert all(folded)
        assert held(pool) == tokens[: starts[-1] if gone == len(sizes) - 1 else None]
    else:
        assert folded.count(False) == 1
        assert pool.get("p0.0") is None
        assert not pool.gained("p0.0")


def test_pool_truncates_to_the_start_of_a_later_lease() -> None:
    pool = PartialPool()
    pool.fold(progress([1, 2, 3], 0, 1))
    pool.fold(progress([4, 5, 6], 3, 1))
    assert pool.fold(progress([9], 4, 5))
    assert held(pool) == [1, 2, 3, 4, 9]
    pool.fold(progress([7, 8], 6, 1))
    assert held(pool) == [1, 2, 3, 4, 9]
    assert pool.fold(progress([0], 0, 6))
    assert held(pool) == [0]


def test_pool_keeps_logprobs_masks_and_versions_with_tokens() -> None:
    pool = PartialPool()
    pool.fold(progress([8, 16], 0, 1, number=0))
    pool.fold(progress([16, 24, 32], 1, 1, number=1))
    partial = pool.get("p0.0")
    assert partial is not None
    assert partial.response == response([8, 16, 24, 32])
    assert partial.version_spans == (VersionSpan(version(0), 2), VersionSpan(version(1), 2))
    assert partial.version is None
    assert PooledPartial(response([8]), (VersionSpan(version(3), 1),)).version == version(3)


def test_pool_gained_counts_only_the_present_owner() -> None:
    pool = PartialPool()
    pool.fold(progress([1], 0, 1))
    assert pool.gained("p0.0")
    pool.start_lease("p0.0", 2, pool.get("p0.0"))
    assert not pool.gained("p0.0")
    pool.fold(progress([2], 1, 1))
    assert not pool.gained("p0.0")
    pool.fold(progress([2], 1, 2))
    assert pool.gained("p0.0")
    assert held(pool) == [1, 2]
    assert pool.drop("p0.0")
    assert not pool.drop("p0.0")
    assert pool.get("p0.0") is None


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [(0, 5, [(0, 2), (1, 3)]), (1, 3, [(0, 1), (1, 1)]), (2, 5, [(1, 3)]), (0, 0, []), (4, 9, [(1, 1)])],
)
def test_cut_spans_returns_the_spans_of_a_token_range(start: int, stop: int, expected: list[tuple[int, int]]) -> None:
    spans = (VersionSpan(version(0), 2), VersionSpan(version(1), 3))
    assert cut_spans(spans, start, stop) == tuple(VersionSpan(version(n), length) for n, length in expected)


def test_join_spans_merges_neighbours_of_one_version() -> None:
    a, b = VersionSpan(version(0), 2), VersionSpan(version(1), 3)
    assert join_spans([(a,), (a, b), (b, a)]) == (VersionSpan(version(0), 4), VersionSpan(version(1), 6), a)
