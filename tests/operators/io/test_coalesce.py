"""coalesce: consecutive outputs of one class share a record; the order within topic, partition and key is kept."""

from __future__ import annotations

import pytest

from operators.io.coalesce import coalesce
from operators.io.elements import Output
from schemas.codec import decode
from schemas.columns import token_ids
from schemas.records import Assignment, Cancel, Metric, Prompt, Sampling
from schemas.topics import INBOX, METRICS, PROMPTS

PROMPT = Prompt(3, "train", "sum", "2 + 3?", token_ids([1, 2]), "{}", 4, Sampling(1.0, 1.0, 0, 8, (2,), 1))
ASSIGNMENT = Assignment(PROMPT, 1, 5, 1, 0, 4, None, None, 1_700_000_000_000)
CANCEL = Cancel(("p3.1",), (5,), 0, 4)
METRIC = Metric("loss", 1, {"value": 0.5}, 1_700_000_000_000)


def written(*outputs: Output) -> list[tuple[str, int | None, bytes | None, list[object]]]:
    made = coalesce(outputs, lambda topic: topic.name("run"))
    return [(o.topic, o.partition, o.key, decode(o.value, o.headers)) for o in made]


@pytest.mark.parametrize(
    ("records", "groups"),
    [
        ([], []),
        ([ASSIGNMENT, ASSIGNMENT], [[ASSIGNMENT, ASSIGNMENT]]),
        ([ASSIGNMENT, CANCEL, ASSIGNMENT], [[ASSIGNMENT], [CANCEL], [ASSIGNMENT]]),
        ([CANCEL, CANCEL, ASSIGNMENT, ASSIGNMENT], [[CANCEL], [CANCEL], [ASSIGNMENT, ASSIGNMENT]]),
    ],
)
def test_coalesce_joins_consecutive_outputs_of_one_class(records: list[object], groups: list[list[object]]) -> None:
    name = INBOX.name("run")
    assert written(*(Output(INBOX, "", r, 3) for r in records)) == [(name, 3, None, group) for group in groups]


def test_coalesce_separates_keys_partitions_and_topics() -> None:
    outputs = [Output(PROMPTS, k, PROMPT, p) for k, p in (("a", None), ("b", None), ("a", None), ("a", 1))]
    assert written(*outputs) == [
        (PROMPTS.name("run"), None, b"a", [PROMPT, PROMPT]),
        (PROMPTS.name("run"), None, b"b", [PROMPT]),
        (PROMPTS.name("run"), 1, b"a", [PROMPT]),
    ]


def test_coalesce_writes_one_json_record_per_output() -> None:
    assert written(*[Output(METRICS, "loss", METRIC)] * 2) == [(METRICS.name("run"), None, b"loss", [METRIC])] * 2


def test_coalesce_splits_many_rows_into_several_records() -> None:
    records = written(*[Output(PROMPTS, "a", PROMPT)] * 600)
    assert [len(rows) for *_, rows in records] == [256, 256, 88]


def test_coalesce_raises_for_other_classes() -> None:
    with pytest.raises(KeyError):
        written(Output(PROMPTS, "a", object()))
