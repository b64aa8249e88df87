"""The pool holds what the replicas hold, whatever order, doubling or loss of records, owners and leases there is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_factories import version

from operators.placement.pool import PartialPool, PooledPartial, cut_spans, join_spans
from schemas.columns import flags, floats, token_ids
from schemas.records import Progress, Response, VersionSpan

NAMES = ("p0.0", "p0.1", "p7.3")


def response(tokens: list[int]) -> Response:
    return Response(token_ids(tokens), floats([-t / 8 for t in tokens]), flags([True] * len(tokens)))


def progress(tokens: list[int], start: int, lease: int, name: str = "p0.0", number: int = 0) -> Progress:
    spans = (VersionSpan(version(number), len(tokens)),) if tokens else ()
    return Progress(name, lease, 1, 0, 1, start, response(tokens), spans, None, None, 0)


def held(pool: PartialPool, name: str = "p0.0") -> list[int]:
    partial = pool.get(name)
    return [] if partial is None else partial.response.token_ids.to_pylist()


@dataclass
class Holder:
    """A replica that has one trajectory: what it holds, and how much of that it has told."""

    lease: int
    tokens: list[int]
    told: int


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "tell", "tell", "again", "lose", "move", "zombie"]),
        st.sampled_from(NAMES),
        st.integers(1, 4),
    ),
    max_size=60,
)


@given(OPERATIONS, st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_the_fold_is_what_the_replica_holds(operations: list[tuple[str, str, int]], rng) -> None:
    """Owners step, tell, are lost and hand over; what was told comes again, and former owners go on talking."""
    pool, lease = PartialPool(), len(NAMES)
    holders = {name: Holder(i, [], 0) for i, name in enumerate(NAMES)}
    log: list[Progress] = []
    zombies: list[tuple[str, Holder]] = []

    def tell(name: str, holder: Holder) -> Progress:
        record = progress(holder.tokens[holder.told :], holder.told, holder.lease, name)
        holder.told = len(holder.tokens)
        return record

    for what, name, size in operations:
        holder = holders[name]
        if what == "step":
            holder.tokens += [rng.randrange(100) for _ in range(size)]
        elif what == "tell":
            log.append(tell(name, holder))
            assert pool.fold(log[-1])
        elif what == "again" and log:
            assert pool.fold(rng.choice(log))  # delivered a second time, at any later time
        elif what == "lose":
            zombies.append((name, replace(holder, tokens=list(holder.tokens))))
            lease += 1
            partial = pool.get(name)
            pool.begin(name, lease, partial)
            kept = [] if partial is None else partial.response.token_ids.to_pylist()
            holders[name] = Holder(lease, kept, len(kept))
        elif what == "move":
            log.append(tell(name, holder))
            assert pool.fold(log[-1])
            zombies.append((name, replace(holder, tokens=list(holder.tokens))))
            lease += 1
            pool.hand_over(name, lease)
            holders[name] = replace(holder, lease=lease, tokens=list(holder.tokens))
        elif what == "zombie" and zombies:
            whose, zombie = rng.choice(zombies)
            zombie.tokens += [rng.randrange(100, 200) for _ in range(size)]
            pool.fold(tell(whose, zombie))  # with tokens of its own, and gaps: no matter
    for name, holder in holders.items():
        assert held(pool, name) == holder.tokens[: holder.told]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(0, 7), st.data())
@settings(max_examples=150, deadline=None)
def test_a_record_that_is_missing_is_seen_and_nothing_is_made_up(sizes: list[int], gone: int, data) -> None:
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


def test_a_later_lease_cuts_back_to_where_it_starts() -> None:
    pool = PartialPool()
    pool.fold(progress([1, 2, 3], 0, 1))
    pool.fold(progress([4, 5, 6], 3, 1))
    assert pool.fold(progress([9], 4, 5))
    assert held(pool) == [1, 2, 3, 4, 9]
    pool.fold(progress([7, 8], 6, 1))
    assert held(pool) == [1, 2, 3, 4, 9]
    assert pool.fold(progress([0], 0, 6))
    assert held(pool) == [0]


def test_logprobs_masks_and_versions_go_with_their_tokens() -> None:
    pool = PartialPool()
    pool.fold(progress([8, 16], 0, 1, number=0))
    pool.fold(progress([16, 24, 32], 1, 1, number=1))
    partial = pool.get("p0.0")
    assert partial is not None
    assert partial.response == response([8, 16, 24, 32])
    assert partial.version_spans == (VersionSpan(version(0), 2), VersionSpan(version(1), 2))
    assert partial.version is None
    assert PooledPartial(response([8]), (VersionSpan(version(3), 1),)).version == version(3)


def test_only_what_the_present_owner_added_is_its_gain() -> None:
    pool = PartialPool()
    pool.fold(progress([1], 0, 1))
    assert pool.gained("p0.0")
    pool.begin("p0.0", 2, pool.get("p0.0"))
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
def test_spans_are_cut_with_their_tokens(start: int, stop: int, expected: list[tuple[int, int]]) -> None:
    spans = (VersionSpan(version(0), 2), VersionSpan(version(1), 3))
    assert cut_spans(spans, start, stop) == tuple(VersionSpan(version(n), length) for n, length in expected)


def test_spans_of_one_version_become_one() -> None:
    a, b = VersionSpan(version(0), 2), VersionSpan(version(1), 3)
    assert join_spans([(a,), (a, b), (b, a)]) == (VersionSpan(version(0), 4), VersionSpan(version(1), 6), a)
