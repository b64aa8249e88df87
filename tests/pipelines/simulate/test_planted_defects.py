"""Each planted defect fits the present code and changes a history; only its own failures count."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mutations import MUTATIONS
from regressions import recorded

sys.path.insert(0, str(Path(__file__).parents[2] / "soak"))

import simulated_mutations

from operators.score.score_trajectories import _Scoring
from pipelines.simulate.configurations import LONG_ANSWERS, wiring
from pipelines.simulate.explore import play
from pipelines.simulate.faults import Fault, FaultKind
from pipelines.simulate.world import SimulatedHistory, World


def disturbed(shape: str, kind: FaultKind, seconds: float, *others: Fault) -> SimulatedHistory:
    """A history in which each process of a run has the same fault, one after the other."""
    names = [each.role.name for each in wiring(shape)]
    faults = [Fault(5.0 + 1.1 * n, kind, name, seconds, n) for n, name in enumerate(names)]
    return SimulatedHistory(0, shape, (*faults, *others))


HISTORIES = (
    disturbed("relays with deltas", "kill", 1.0),
    disturbed("ranks", "kill", 1.0),
    disturbed(
        "plain",
        "replace",
        3.0,
        Fault(5.0, "trim", "placement", 30.0, 90),
        Fault(9.0, "upgrade_run", "score", 2.0, 91),
        Fault(11.5, "pause_run", "placement", 6.0, 92),
        Fault(13.5, "kill", "placement", 1.0, 93),
        Fault(16.0, "trim", "placement", 30.0, 94),
    ),
)
RARE = {
    "note_of_an_aborted_transaction_counts",
    "unknown_outcome_is_retried",
    "end_of_a_transaction_is_sent_again",
    "old_lease_is_accepted",
    "placement_does_not_fence",
    "chunk_is_accepted_without_its_checksum",
    "kv_of_an_older_lease_is_kept",
    "version_is_offered_once",
    "restored_version_is_not_delivered",
    "rank_reads_on_where_it_has_committed",
    "start_reads_from_any_broker",
    "trim_writes_no_trim_point",
    "placement_decides_before_it_has_caught_up",
    "new_shards_read_from_the_farthest_position",
}
"""Defects that need rarer faults than those of HISTORIES: tests/soak/simulated_mutations.py plays them."""

FOUND = {
    "end_of_a_transaction_is_sent_again": SimulatedHistory(
        148, "plain", (Fault(4.832, "requests", "experience", 14.0, 14),)
    ),
    "old_lease_is_accepted": SimulatedHistory(
        0, LONG_ANSWERS, (Fault(8.0, "kill", "rollout-1", 1.0, 0), Fault(12.0, "kill", "placement", 1.0, 1))
    ),
    "start_reads_from_any_broker": recorded("older-note-of-an-isolated-broker"),
    "rank_reads_on_where_it_has_committed": SimulatedHistory(
        5, "ranks", (Fault(21.74, "change_ranks", "rollout-0", 4.451, 115),)
    ),
    "restored_version_is_not_delivered": recorded("version-of-an-ended-start"),
    "new_shards_read_from_the_farthest_position": SimulatedHistory(
        0,
        "buffer shards",
        (Fault(5.0, "pause", "experience-1", 4.5, 5), Fault(9.0, "reshard_run", "experience", 2.0, 0)),
    ),
    "placement_decides_before_it_has_caught_up": SimulatedHistory(
        12,
        "repack",
        (Fault(8.308, "pause", "rollout-1", 18.416, 7), Fault(9.35, "replace", "placement", 0.243, 0)),
    ),
}
"""Histories that find rare defects: EndTxn is late and Produce slow, by the number of the fault; an owner is lost
before the restart of placement; a placement that has not read what its predecessor admitted admits too many."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Each fault of each history would log a warning."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def digests() -> list[str]:
    """The digests of HISTORIES, which pass."""
    played = [play(history) for history in HISTORIES]
    assert [each.failure for each in played] == [None] * len(HISTORIES)
    return [each.digest for each in played]


@pytest.mark.parametrize("name", sorted(RARE - FOUND.keys()))
def test_rare_planted_defect_fits_the_code(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    MUTATIONS[name](monkeypatch)  # raises if what it patches is gone


@pytest.mark.parametrize("name", FOUND)
def test_rare_planted_defect_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert play(FOUND[name]).failure is None
    MUTATIONS[name](monkeypatch)
    assert play(FOUND[name]).failure is not None


@pytest.mark.parametrize("name", sorted(MUTATIONS.keys() - RARE))
def test_planted_defect_changes_a_history(monkeypatch: pytest.MonkeyPatch, name: str, digests: list[str]) -> None:
    MUTATIONS[name](monkeypatch)
    for history, digest in zip(HISTORIES, digests, strict=True):
        played = play(history)
        assert not simulated_mutations.STALE.search(played.failure or ""), played.failure
        if played.failure is not None or played.digest != digest:
            return
    pytest.fail(f"{name} changes nothing in {len(HISTORIES)} histories")


def test_failure_without_the_defect_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def violate(self: World) -> None:
        self.fail("it fails anyway")

    monkeypatch.setattr(World, "_tick", violate)
    assert simulated_mutations.histories_until_found(lambda patch: None, 2) == (None, "")


def test_stale_patch_is_named_and_finds_nothing() -> None:
    def stale(patch: pytest.MonkeyPatch) -> None:
        def fold(self: Any) -> None:
            """Takes no argument any more."""

        patch.setattr(_Scoring, "fold", fold)

    count, failure = simulated_mutations.histories_until_found(stale, 2)
    assert count is None
    assert failure.startswith("the patch is stale: score ended with TypeError")
