"""Datasets in the forms that others' trainers read: each view is a pure function of the rows of one file.

Every view but `full` is of experiences. Rows keep their place in the log, so `export verify` holds for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from operators.export.columns import PLACE, row_schema
from schemas.topics import EXPERIENCES, Topic

ViewName = Literal["full", "trl", "verl", "sft", "preference"]

_ROW = pa.schema([PLACE.field(name) for name in ("kafka_partition", "kafka_offset", "kafka_row")])
_MESSAGES = pa.list_(pa.struct([("role", pa.utf8()), ("content", pa.utf8())]))


class View(NamedTuple):
    """`condition` is on the full rows and holds beside the user's; `make` turns those left into `schema`."""

    about: str
    schema: pa.Schema
    condition: str
    make: Callable[[pa.Table], pa.Table]


def view_of(topic: Topic, name: ViewName) -> View:
    """View `name` of `topic`. Raises ValueError where it is of another topic's rows."""
    if name == "full":
        return View("every field of every record", row_schema(topic), "", lambda table: table)
    if topic is not EXPERIENCES:
        raise ValueError(f"the view {name} is of experiences; {topic.short_name} have the view full alone")
    return _VIEWS[name]


def _schema(*fields: tuple[str, pa.DataType]) -> pa.Schema:
    return pa.schema([*(pa.field(*field) for field in fields), *_ROW], metadata=row_schema(EXPERIENCES).metadata)


def _answers(table: pa.Table) -> pa.Table:
    return _named(_ANSWERS, table, {"prompt": table["prompt_text"], "completion": table["completion_text"]})


def _questions(table: pa.Table) -> pa.Table:
    questions = table["prompt_text"].combine_chunks()
    return _named(
        _QUESTIONS,
        table,
        {
            "data_source": table["task"],
            "prompt": _one_message("user", questions),
            "ability": table["task"],
            "reward_model": _struct(
                style=pa.repeat("rule", len(table)), ground_truth=table["ground_truth"].combine_chunks()
            ),
            "extra_info": _struct(
                split=pc.if_else(pc.equal(table["purpose"], "evaluation"), "test", "train").combine_chunks(),
                index=table["prompt_number"].combine_chunks(),
            ),
        },
    )


def _pairs(table: pa.Table) -> pa.Table:
    """The best and the worst answer of each group, where they differ in reward; the first of equals."""
    numbered = pa.table({"group": table["group_id"], "reward": table["reward"], "row": pa.arange(0, len(table))})
    best = numbered.sort_by([("reward", "descending"), ("row", "ascending")]).group_by("group", use_threads=False)
    worst = numbered.sort_by([("reward", "ascending"), ("row", "ascending")]).group_by("group", use_threads=False)
    pairs = best.aggregate([("row", "first")]).join(
        worst.aggregate([("row", "first")]), "group", right_suffix="_worst", use_threads=False
    )
    pairs = pairs.sort_by("row_first")
    chosen, rejected = table.take(pairs["row_first"]), table.take(pairs["row_first_worst"])
    differ = pc.greater(chosen["reward"], rejected["reward"])
    chosen, rejected = chosen.filter(differ), rejected.filter(differ)
    return _named(
        _PAIRS,
        chosen,
        {
            "prompt": chosen["prompt_text"],
            "chosen": chosen["completion_text"],
            "rejected": rejected["completion_text"],
            "reward_chosen": chosen["reward"],
            "reward_rejected": rejected["reward"],
            "rejected_trajectory_id": rejected["trajectory_id"],
        },
    )


def _named(schema: pa.Schema, table: pa.Table, made: Mapping[str, pa.Array]) -> pa.Table:
    """`made`, and whatever else of `schema` stands in `table` under its own name."""
    columns = [made[name] if name in made else table[name] for name in schema.names]
    return pa.Table.from_arrays(columns, schema=schema)


def _one_message(role: str, contents: pa.Array) -> pa.Array:
    messages = pa.StructArray.from_arrays([pa.repeat(role, len(contents)), contents], fields=list(_MESSAGES.value_type))
    return pa.ListArray.from_arrays(pa.arange(0, len(contents) + 1).cast(pa.int32()), messages, type=_MESSAGES)


def _struct(**parts: pa.Array) -> pa.Array:
    return pa.StructArray.from_arrays(list(parts.values()), names=list(parts))


_ANSWERS = _schema(
    ("prompt", pa.utf8()),
    ("completion", pa.utf8()),
    ("reward", pa.float64()),
    ("task", pa.utf8()),
    ("ground_truth", pa.utf8()),
    ("trajectory_id", pa.utf8()),
    ("group_id", pa.utf8()),
    ("policy_version", pa.int64()),
)
_PAIRS = _schema(
    ("prompt", pa.utf8()),
    ("chosen", pa.utf8()),
    ("rejected", pa.utf8()),
    ("reward_chosen", pa.float64()),
    ("reward_rejected", pa.float64()),
    ("trajectory_id", pa.utf8()),
    ("rejected_trajectory_id", pa.utf8()),
    ("group_id", pa.utf8()),
)
_QUESTIONS = _schema(
    ("data_source", pa.utf8()),
    ("prompt", _MESSAGES),
    ("ability", pa.utf8()),
    ("reward_model", pa.struct([("style", pa.utf8()), ("ground_truth", pa.utf8())])),
    ("extra_info", pa.struct([("split", pa.utf8()), ("index", pa.int64())])),
)
_VIEWS: Mapping[str, View] = {
    "trl": View("TRL's prompt and completion, with the reward", _ANSWERS, "finish_reason != 'failed'", _answers),
    "sft": View(
        "prompt and completion of whole answers with a reward of 0.5 or more",
        _ANSWERS,
        "finish_reason = 'stop' and reward >= 0.5",
        _answers,
    ),
    "preference": View(
        "prompt, chosen and rejected: the best and the worst answer of each group, as far as it is in one file",
        _PAIRS,
        "finish_reason != 'failed'",
        _pairs,
    ),
    "verl": View("verl's questions: one row a group", _QUESTIONS, "member = 0", _questions),
}
