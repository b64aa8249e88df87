"""Batch assembly accepts each number once, in order, whatever other records are in the topic."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_batches import make_batch

from operators.trainer.assembly import MAX_UNFINISHED, BatchAssembly, WholeBatch
from schemas.records import MicroBatch

(PART,) = make_batch(groups=1, samples=1)


def part(batch: int, index: int = 0, count: int = 1, rank: int = 0) -> MicroBatch:
    return replace(PART, batch=batch, index=index, count=count, rank=rank)


def feed(assembly: BatchAssembly, *parts: MicroBatch, partition: int = 0, offset: int = 0) -> list[int]:
    """The numbers of the batches completed by `parts`, which have consecutive offsets."""
    whole = (assembly.add(each, partition, offset + at) for at, each in enumerate(parts))
    return [batch.number for batch in chain.from_iterable(whole)]


def reasons(assembly: BatchAssembly) -> list[tuple[int, str]]:
    return [(rejected.offset, rejected.reason) for rejected in assembly.rejected]


def test_assembly_completes_a_batch_with_its_last_part() -> None:
    assembly = BatchAssembly()
    assert feed(assembly, part(0, 0, 3), part(0, 1, 3), offset=7) == []
    (whole,) = assembly.add(part(0, 2, 3), 0, 10)
    assert ([each.index for each in whole.parts], whole.next_offsets) == ([0, 1, 2], (11,))


def test_assembly_completes_a_batch_with_its_last_partition() -> None:
    assembly = BatchAssembly(range(2), divisions=2)
    assert feed(assembly, part(0), part(1), part(2)) == []
    assert feed(assembly, part(0, 0, 2), part(0, 1, 2), part(1), partition=1) == [0, 1]
    assert reasons(assembly) == []


@pytest.mark.parametrize(
    ("strange", "reason"),
    [
        (part(0), "batch 0 was accepted before, the next one is 1"),
        (part(-1), "part 0 of 1 of batch -1 is out of range"),
        (part(1, 0, 0), "part 0 of 0 of batch 1 is out of range"),
        (part(1, -1, 2), "part -1 of 2 of batch 1 is out of range"),
        (part(1, 2, 2), "part 2 of 2 of batch 1 is out of range"),
        (part(1, 1, 2), "part 1 of 2 of batch 1 continues no batch"),
        (part(1, rank=1), "a part of share 1 in a partition of share 0"),
    ],
)
def test_assembly_rejects_an_invalid_part_at_once(strange: MicroBatch, reason: str) -> None:
    assembly = BatchAssembly()
    feed(assembly, part(0))
    assert feed(assembly, strange, offset=1) == []
    assert reasons(assembly) == [(1, reason)]
    assert feed(assembly, part(1), offset=2) == [1]


@pytest.mark.parametrize(
    ("strange", "reason"),
    [
        (part(2), "batch 2 arrived before batch 1"),
        (part(2**62), f"batch {2**62} arrived before batch 1"),
        (part(1, 0, 2**40), f"part 0 of {2**40} of batch 1, whose other parts never arrived"),
    ],
)
def test_assembly_rejects_other_parts_when_the_batch_is_complete(strange: MicroBatch, reason: str) -> None:
    assembly = BatchAssembly()
    feed(assembly, part(0))
    assert feed(assembly, strange, part(1, 0, 2), offset=1) == []
    assert reasons(assembly) == []
    assert feed(assembly, part(1, 1, 2), part(2), offset=3) == [1, 2]
    assert reasons(assembly) == [(1, reason)]


def test_assembly_bounds_incomplete_batches_of_one_number() -> None:
    assembly = BatchAssembly()
    feed(assembly, *(part(0, 0, count) for count in range(2, 100)))
    assert len(assembly.rejected) == 98 - MAX_UNFINISHED
    assert feed(assembly, part(0)) == [0]
    assert len(assembly.rejected) == 98


def test_assembly_reports_a_gap_until_the_batch_arrives() -> None:
    assembly = BatchAssembly(first=3)
    assert assembly.missing() is None
    feed(assembly, part(5), offset=12)
    assert "global batch 3 is missing in batches partition 0: batch 5 is at offset 12" in str(assembly.missing())
    assert feed(assembly, part(3), offset=13) == [3]
    assert assembly.missing() is None


def test_assembly_returns_lost_batches_without_parts() -> None:
    assembly = BatchAssembly(range(2), divisions=2, lost=(0, 2), starts=(5, 6))
    assert assembly.take() == [WholeBatch(0, (), (5, 6))]
    assert feed(assembly, part(1), partition=0, offset=5) == []
    assert feed(assembly, part(0), part(1), part(2), part(3), partition=1, offset=6) == [1, 2]
    assert [reason for _, reason in reasons(assembly)] == [
        f"batch {number} is one of trainer.lost_batches" for number in (0, 2)
    ]
    assert feed(assembly, part(3), offset=6) == [3]


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), divisions=st.integers(1, 3), ranks=st.integers(1, 2), batches=st.integers(1, 6))
def test_assembly_accepts_the_same_on_all_ranks_and_in_replay(
    seed: int, divisions: int, ranks: int, batches: int
) -> None:
    """Repeated, later and contradicting parts between whole batches change nothing, wherever reading begins."""
    rng = random.Random(seed)
    log: dict[int, list[MicroBatch]] = {p: [] for p in range(ranks * divisions)}
    for number in range(batches):
        for partition, parts in log.items():
            for _ in range(rng.randrange(3)):
                parts.append(
                    part(
                        rng.choice([number - 1, number + 1, 10**9, -5]),
                        rng.randrange(-1, 3),
                        rng.choice([1, 2, 2**40]),
                        rng.randrange(2),
                    )
                )
            count = rng.randrange(1, 4)
            parts += [part(number, index, count, partition // divisions) for index in range(count)]
    order = [partition for partition, parts in log.items() for _ in parts]
    rng.shuffle(order)
    taken = dict.fromkeys(log, 0)
    alone = BatchAssembly(range(ranks * divisions), divisions=divisions)
    apart = [BatchAssembly(range(r * divisions, (r + 1) * divisions), divisions=divisions) for r in range(ranks)]
    found: list[list[WholeBatch]] = [[] for _ in range(ranks + 1)]
    for partition in order:
        offset = taken[partition]
        taken[partition] += 1
        for assembly, into in ((alone, found[-1]), (apart[partition // divisions], found[partition // divisions])):
            into += assembly.add(log[partition][offset], partition, offset)
    for whole in found:
        assert [batch.number for batch in whole] == list(range(batches))
    for number in range(batches):
        offsets = chain.from_iterable(found[rank][number].next_offsets for rank in range(ranks))
        assert found[-1][number].next_offsets == tuple(offsets)
    assert len(alone.rejected) == sum(len(each.rejected) for each in apart)
    begun = rng.randrange(batches)
    starts = found[-1][begun].next_offsets
    again = BatchAssembly(range(ranks * divisions), divisions=divisions, first=begun + 1, starts=starts)
    rest = [
        batch
        for partition, start in enumerate(starts)
        for offset in range(start, len(log[partition]))
        for batch in again.add(log[partition][offset], partition, offset)
    ]
    assert [(batch.number, batch.next_offsets) for batch in rest] == [
        (batch.number, batch.next_offsets) for batch in found[-1][begun + 1 :]
    ]
