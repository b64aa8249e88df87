"""Decoded control records that are invalid become dead letters before a step receives them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from record_factories import manifest, version
from record_samples import SAMPLES, TRAJECTORY

from operators.io.elements import Polled, ReceivedRecord
from operators.io.fold_records import reject_invalid
from operators.io.validation import ManifestOrder, invalid_reason
from pipelines.roles import relay_of
from schemas import records as r
from schemas.block import Block
from schemas.columns import token_ids

NEGATIVE = replace(TRAJECTORY.response, token_ids=token_ids([4, -1, 2]))


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        (r.RelayChain, {"number": 2**60}, "number is"),
        (r.RelayChain, {"joining": (99,)}, "do not form a chain"),
        (r.RelayChain, {"links": (r.RelayLink(1, "nowhere", "", ""),), "joining": ()}, "is not an address"),
        (r.RelayStatus, {"versions": ("newest",)}, "not a policy version"),
        (r.ReplicaStatus, {"incarnation": 2**40}, "incarnation is"),
        (r.ReplicaStatus, {"sent_at": 10**17}, "sent_at is"),
        (r.ReplicaStatus, {"first_incarnation": 10**6}, "first_incarnation 1000000 is not one up to"),
        (r.Metric, {"measured_at": 10**17}, "measured_at is"),
        (r.Settled, {"trajectory_id": "p1"}, "not a trajectory id"),
        (r.Settled, {"outcome": "dropped", "batch": 3}, "outcome dropped does not fit batch 3"),
        (r.Prompt, {"samples": 2**40}, "samples is"),
        (r.BatchProposal, {"sizes": (8,)}, "2 groups with 1 sizes"),
        (r.LevelSuccess, {"answered": (3,)}, "more correct answers than answers"),
        (r.Release, {"leases": (8,)}, "2 trajectories with 1 leases"),
        (r.Progress, {"version_spans": ()}, "do not agree"),
        (r.Progress, {"gained": NEGATIVE}, "token -1 is negative"),
        (r.Assignment, {"partial": NEGATIVE}, "token -1 is negative"),
        (r.TurnRequest, {"tools": "["}, "its tools are not a JSON list of functions with names"),
        (r.TurnRequest, {"tools": '[{"function": {"name": ["f"]}}]'}, "its tools are not"),
        (r.TurnRequest, {"tools": "[" * 100_000}, "its tools are not"),
        (r.TurnRequest, {"messages": "["}, "its messages are not a JSON list of objects"),
        (r.TurnRequest, {"messages": "[3]"}, "its messages are not"),
        (r.Prompt, {"environment": "agent", "reference": "{"}, "its reference is not JSON: '{'"),
    ],
)
def test_validation_names_the_invalid_field(kind: type, changes: dict[str, Any], reason: str) -> None:
    found = invalid_reason(replace(SAMPLES[kind], **changes))  # type: ignore[type-var]
    assert found is not None
    assert reason in found


@pytest.mark.parametrize("kind", [kind for kind in SAMPLES if kind not in (r.WeightVersion, r.MicroBatch)])
def test_validation_accepts_the_sample_of_every_class(kind: type) -> None:
    assert invalid_reason(SAMPLES[kind]) is None


@pytest.mark.parametrize("machine", ["n1", "gpu-0.example.com", "127.0.0.1"])
def test_validation_accepts_the_relay_of_any_machine(machine: str) -> None:
    status, link = replace(SAMPLES[r.RelayStatus], relay=relay_of(machine)), SAMPLES[r.RelayChain].links[0]  # type: ignore[type-var, attr-defined]
    chain = replace(SAMPLES[r.RelayChain], links=(replace(link, relay=relay_of(machine)),), joining=())  # type: ignore[type-var]
    assert (invalid_reason(status), invalid_reason(chain)) == (None, None)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (manifest(version(2), (1,), version(1)), None),
        (manifest(version(4, 2), (1, 2, 3), version(1)), None),
        (manifest(version(2), (), version(1)), None),  # `laminar weights publish`
        (manifest(version(2), (0,), version(1)), "does not follow from"),
        (manifest(version(10**9), (), version(1)), "does not follow from"),
        (manifest(version(10**9), (10**9 - 1,), version(10**9 - 1)), "the newest published number is 1"),
        (manifest(version(2, 10**6), (1,), version(1)), "is too far ahead of the newest, 1.1"),
        (manifest(version(1), (), version(2)), "does not follow its parent"),
        (replace(manifest(version(2), (1,), version(1)), untrained_batches=(0,)), "are not among its batches"),
    ],
)
def test_manifest_order_rejects_versions_that_do_not_follow(record: r.WeightVersion, reason: str | None) -> None:
    order = ManifestOrder()
    assert order.invalid_reason(manifest(version(1), (0,))) is None
    found = invalid_reason(record) or order.invalid_reason(record)
    assert (found is None) == (reason is None)
    assert (reason or "") in (found or "")


def test_manifest_order_continues_from_the_last_note() -> None:
    order = ManifestOrder()
    assert order.state() == {}
    assert order.invalid_reason(manifest(version(2, 4), (0, 1))) is None
    restarted = ManifestOrder({"lease": 3, **order.state()})
    late = manifest(version(1, 3), (0,))  # of a trainer that was paused while its successor published two versions
    assert restarted.invalid_reason(late) is None
    assert restarted.invalid_reason(manifest(version(3, 4), (2,), version(2, 4))) is None
    assert restarted.state() == {"newest_manifest": [4, 3]}


def test_reject_invalid_makes_records_and_rows_dead_letters() -> None:
    invalid = replace(TRAJECTORY, member=2**40)
    block = Block.of([TRAJECTORY, invalid, TRAJECTORY])
    records = (
        ReceivedRecord("trajectories", 0, 7, block),
        ReceivedRecord("settled", 0, 8, replace(SAMPLES[r.Settled], group_size=0)),  # type: ignore[type-var]
        ReceivedRecord("settled", 0, 9, SAMPLES[r.Settled]),
    )
    polled, letters = reject_invalid(Polled("g", 1, records, (), {}, True), ManifestOrder(), 0)
    assert [(each.offset, len(each.record) if each.offset == 7 else 1) for each in polled.records] == [(7, 2), (9, 1)]
    assert [(letter.record.topic, letter.record.offset) for letter in letters] == [("settled", 8), ("trajectories", 7)]


def test_reject_invalid_compares_manifests_of_several_polls() -> None:
    order, kept = ManifestOrder(), []
    for offset, number in enumerate((0, 10**6, 1)):
        parent = version(number - 1) if number else None
        record = manifest(version(number), (number - 1,) if number else (), parent)
        polled, letters = reject_invalid(
            Polled("g", 1, (ReceivedRecord("relay", 0, offset, record),), (), {}, True), order, 0
        )
        kept += [each.offset for each in polled.records]
        assert [letter.record.offset for letter in letters] == [1] * (number == 10**6)
    assert kept == [0, 2]
