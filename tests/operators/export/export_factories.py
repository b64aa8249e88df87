"""Factories of experiences as a consumer receives them, and of exports without a broker."""

from __future__ import annotations

from dataclasses import replace

from infra.storage import StorageFolder
from operators.export.columns import RecordRows, as_table
from operators.export.config import Contents, ExportConfig
from operators.export.export_topic import Exporting
from operators.export.folder import next_offsets, read_parts
from operators.io.elements import PartitionKey, Polled, ReceivedRecord
from schemas import records as r
from schemas.block import Block
from schemas.columns import flags, floats, token_ids
from schemas.records import DeadLetter
from schemas.topics import EXPERIENCES

CONTENTS = Contents("run", "experiences", starts={0: 0})
VERSION = r.PolicyVersion(1, 3)


def experience(
    number: int, member: int = 0, reward: float = 1.0, tokens: int = 4, messages: tuple[r.Message, ...] = ()
) -> r.Experience:
    sampling = r.Sampling(1.0, 1.0, 0, 8, (0,), 0)
    asked = r.Prompt(
        number, "train", "sums", f"What is {number} + 1?", token_ids([1, 2]), '{"answer": "1"}', 2, sampling
    )
    asked = replace(asked, messages=messages)
    response = r.Response(token_ids([5] * tokens), floats([-0.5] * tokens), flags([True] * tokens))
    spans = (r.VersionSpan(VERSION, tokens),) if tokens else ()
    made = r.Trajectory(
        asked, member, 1, 1, 0, 1, response, f"answer {member}", spans, r.PolicyVersion(1, 5), "stop", None, 0, None, 9
    )
    return r.Experience(made, reward, (r.RewardComponent("exact", reward, 1.0),), None, 10)


def block(*rows: r.Experience) -> Block:
    return Block.of(rows)


def rows_of(*experiences: r.Experience, offset: int = 0):
    placed = [RecordRows.of_one(block(each), offset + i, 1000 + i) for i, each in enumerate(experiences)]
    return as_table(EXPERIENCES, 0, placed)


def polled(
    first: int,
    count: int,
    *,
    last: bool = False,
    undecodable: tuple[int, ...] = (),
    hole: int = 1,
    messages: tuple[r.Message, ...] = (),
) -> Polled:
    """Records at `count` offsets from `first` on, those of `undecodable` undecodable, then a gap as markers leave."""
    decodable = [offset for offset in range(first, first + count) if offset not in undecodable]
    received = tuple(
        ReceivedRecord("experiences", 0, offset, block(*pair), 1000)
        for offset in decodable
        for pair in [[experience(offset, n, 1.0 - n, messages=messages) for n in (0, 1)]]
    )
    dead_letters = tuple(DeadLetter("read", "nonsense", "experiences", 0, offset, b"", 0) for offset in undecodable)
    return Polled(
        "group", 1, received, dead_letters, {PartitionKey("experiences", 0): first + count + hole}, True, last
    )


def export(folder: StorageFolder, polls: list[Polled], contents: Contents = CONTENTS, **how: object) -> Exporting:
    """Fold `polls` into `folder`; returns the open fold."""
    exporting = Exporting(replace(ExportConfig(folder, contents), **how), lambda: 0.0)
    for each in polls:
        exporting.fold(each)
    return exporting


def exported_to(folder: StorageFolder, polls: list[Polled], contents: Contents = CONTENTS, **how: object) -> None:
    """Like `export`, but closed at the end."""
    export(folder, polls, contents, **how).close()


def end_of(folder: StorageFolder, contents: Contents = CONTENTS) -> int:
    """The first offset that is not in `folder`."""
    return next_offsets(contents, read_parts(folder))[0]
