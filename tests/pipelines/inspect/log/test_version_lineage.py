"""`laminar lineage`: batches, trajectories and prompts of a weight version."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from record_samples import SAMPLES

from infra.kafka.ranges import PartitionRange
from pipelines.inspect.log.lineage import batch_ranges
from schemas.records import WeightVersion

Laminar = Callable[..., tuple[int, str, str]]
MANIFEST = next(each for each in SAMPLES.values() if isinstance(each, WeightVersion))


def test_lineage_lists_batches_and_prompts_of_a_version(laminar: Laminar) -> None:
    code, out, _ = laminar("lineage", "1.2", "--json")
    (step,) = json.loads(out)
    assert code == 0
    assert (step["version"], step["parent"], step["batches"], step["missing_batches"]) == (
        "1.2",
        "1.1",
        [7],
        [],
    )
    assert (step["trajectories"], step["tokens"], step["reward"]) == (
        3,
        21,
        pytest.approx((0.25 + 1.25 + 0.25) / 3),
    )
    assert (step["staleness"], step["generated_by"]) == ({"1": 3}, {"1.1": 3})
    assert step["prompts"] == [
        {
            "prompt": "p3",
            "task": "chain_sum",
            "text": "What is 3 + 1?",
            "trajectories": ["p3.0", "p3.1"],
            "rewards": [0.25, 1.25],
            "experience": "1:0",
        },
        {
            "prompt": "p4",
            "task": "chain_sum",
            "text": "What is 4 + 1?",
            "trajectories": ["p4.0"],
            "rewards": [0.25],
            "experience": "0:0",
        },
    ]


def test_lineage_follows_ancestors_to_the_first_version(laminar: Laminar) -> None:
    arguments = ("lineage", "latest", "--depth", "0", "--no-texts")
    steps = json.loads(laminar(*arguments, "--json")[1])
    assert [each["version"] for each in steps] == ["2.2", "1.1", "1.0"]
    assert [each["batches"] for each in steps] == [[7], [6], []]
    assert steps[0]["prompts"][0]["text"] is None
    assert laminar(*arguments)[1].splitlines()[-1] == "1.0  first version: the run's initial model"
    assert "mean reward 0.583" in laminar(*arguments)[1]
    staleness = "generated 3 by 1.1; 3 trajectories 1 version behind the newest when the batch was decided (staleness)"
    assert staleness in laminar(*arguments)[1]


def test_lineage_prints_the_manifest_before_reading_batches(laminar: Laminar, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("the batches are unavailable")

    monkeypatch.setattr("pipelines.cli.lineage.read_step", failing)
    code, out, err = laminar("lineage", "1.2")
    assert (code, out) == (1, "1.2  parent 1.1, step 2, batches [7]\n")
    assert "the batches are unavailable" in err


def test_lineage_rejects_an_unknown_version(laminar: Laminar) -> None:
    assert laminar("lineage", "7.7")[0] == 1
    assert laminar("lineage", "seven")[0] == 2


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((3, 4), (9, 4), {0: (3, 9)}),
        (None, (9, 2), {0: (0, 9), 1: (0, 2)}),
        ((12, 4), (9, 5), {1: (4, 5)}),
        ((0, 0), (99, 99), {0: (2, 20), 1: (0, 20)}),
    ],
)
def test_batch_ranges_lie_between_two_manifests(
    before: tuple[int, int] | None, after: tuple[int, int], expected: dict[int, tuple[int, int]]
) -> None:
    held = {0: PartitionRange(0 if before != (0, 0) else 2, 20), 1: PartitionRange(0, 20)}
    parent = None if before is None else replace(MANIFEST, batch_offsets=before)
    found = batch_ranges(held, replace(MANIFEST, batch_offsets=after), parent)
    assert {number: (part.beginning, part.end) for number, part in found.items()} == expected
