"""Defects that histories have found, each with the patch that takes its fix out, and a history that fails without it.

    python tests/pipelines/simulate/regressions.py

finds another history, near the recorded one, for each that does not fail any more: a change of the product or of the
simulation may move its events.
"""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import ANY

import pytest

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from log_mutations import start_reads_from_any_broker  # noqa: E402
from patches import after  # noqa: E402
from rank_mutations import restored_version_is_not_delivered  # noqa: E402
from step_mutations import (  # noqa: E402
    ended_replica_is_lost_at_once,
    question_of_a_version_to_come_fails,
    start_forgets_the_newest_manifest,
)
from transfer_mutations import trim_point_of_another_trim_counts  # noqa: E402

from infra.kafka import resharding  # noqa: E402
from infra.kafka.log_gaps import log_truncated, note_missing  # noqa: E402
from infra.kafka.session import Fenced, Session  # noqa: E402
from infra.kafka.session_config import Partition  # noqa: E402
from infra.kafka.simulated_clients import SimulatedClients  # noqa: E402
from infra.simulation.cluster import Place, SimulatedCluster  # noqa: E402
from operators.placement import place_trajectories  # noqa: E402
from operators.placement.tracking import TrajectoryTracker  # noqa: E402
from operators.trainer.rank_addresses import AddressTopic  # noqa: E402
from pipelines.simulate.explore import play, read_history, shrink, to_json  # noqa: E402
from pipelines.simulate.world import SimulatedHistory  # noqa: E402

FOLDER = Path(__file__).parent / "golden/regressions"
MOST = 3000
"""How many variants of a history are played, at most."""


def gap_of_a_settled_answer_is_a_dead_letter(patch: pytest.MonkeyPatch) -> None:
    """A restart of placement reads the end of an answer again before the record that it is settled."""

    def without_gaps(self: TrajectoryTracker, made: None, *args: Any) -> None:
        self._gaps = None

    after(patch, TrajectoryTracker, "__init__", without_gaps)


def note_of_a_successor_is_not_read(patch: pytest.MonkeyPatch) -> None:
    """A paused start finds no note, and then the offsets that its successor has committed."""

    def changed(self: Session, traces: Any) -> None:
        if traces:
            raise note_missing(self.config.group, self.config.restore.topic, traces)

    patch.setattr(Session, "_check_first_start", changed)


def trim_behind_a_successor_is_fatal(patch: pytest.MonkeyPatch) -> None:
    """A paused start reads on where its successor has read, and where the log was trimmed since."""
    poll = Session.poll

    def changed(self: Session, timeout_s: float) -> Any:
        try:
            return poll(self, timeout_s)
        except Fenced as error:
            if "the log was trimmed" in str(error):
                raise log_truncated(self.config.group, str(error)) from error
            raise

    patch.setattr(Session, "poll", changed)


def open_transaction_is_not_awaited(patch: pytest.MonkeyPatch) -> None:
    """The goal is reached while a role has a transaction open, which the audit waits for."""
    patch.setattr(SimulatedCluster, "open_transactions", lambda self: [])


def seal_of_an_earlier_change_counts(patch: pytest.MonkeyPatch) -> None:
    """A change of the number of shards takes any sealed note of a shard for the one that it has just had written."""

    def retired(config: Any, clients: Any, retire: Callable[[Any, Any], int] = resharding._retire) -> Any:
        retire(config, clients)
        return ANY

    patch.setattr(resharding, "_retire", retired)


def ends_are_those_of_any_broker(patch: pytest.MonkeyPatch) -> None:
    """Placement asks a broker for the ends of topics, which may be cut off from the others."""

    def log_ends(
        clients: SimulatedClients, transactional_id: str, places: Iterable[Partition], transaction_timeout_s: float
    ) -> Mapping[Any, int]:
        brokers, process = clients.connection.network.brokers, clients.connection.process.name
        return {place: brokers.log(process, Place(*place)).end for place in places}

    patch.setattr(place_trajectories, "log_ends", log_ends)


def last_address_of_rank_0_counts(patch: pytest.MonkeyPatch) -> None:
    """Ranks take the last address of rank 0, which a paused start may write after its successor."""
    write = AddressTopic.write
    patch.setattr(AddressTopic, "write", lambda self, address, start: write(self, address, 0))


class Regression(NamedTuple):
    """A fix taken out, and what a failure says then."""

    patch: Callable[[pytest.MonkeyPatch], None]
    failure: str


REGRESSIONS: Mapping[str, Regression] = {
    "progress-of-settled-answers": Regression(gap_of_a_settled_answer_is_a_dead_letter, "tokens before"),
    "note-of-a-successor": Regression(note_of_a_successor_is_not_read, "NoteMissing"),
    "answers-of-an-ended-replica": Regression(ended_replica_is_lost_at_once, "although it is settled"),
    "late-manifest": Regression(start_forgets_the_newest_manifest, "dead letter of relay"),
    "trim-behind-a-successor": Regression(trim_behind_a_successor_is_fatal, "LogTruncated"),
    "older-note-of-an-isolated-broker": Regression(start_reads_from_any_broker, "follows note"),
    "seal-of-an-earlier-change": Regression(seal_of_an_earlier_change_counts, "follows note"),
    "version-of-an-ended-start": Regression(restored_version_is_not_delivered, "is not at host-"),
    "question-before-its-version": Regression(question_of_a_version_to_come_fails, "has failed without a fault"),
    "ends-of-an-isolated-broker": Regression(ends_are_those_of_any_broker, "although it is settled"),
    "address-of-a-paused-start": Regression(last_address_of_rank_0_counts, "has not finished"),
    "two-trims-at-once": Regression(trim_point_of_another_trim_counts, "were assigned; the audit"),
    "open-transaction-at-the-goal": Regression(open_transaction_is_not_awaited, "a transaction has been open"),
}


def recorded(name: str) -> SimulatedHistory:
    """The history of a regression."""
    return read_history(FOLDER / f"{name}.json")


def play_without_the_fix(name: str, history: SimulatedHistory) -> SimulatedHistory:
    """Play a history with the fix taken out."""
    with pytest.MonkeyPatch.context() as patch:
        REGRESSIONS[name].patch(patch)
        return play(history)


def fails(name: str, history: SimulatedHistory) -> bool:
    """Whether a history has failed as this regression does."""
    return history.failure is not None and REGRESSIONS[name].failure in history.failure


def variants(history: SimulatedHistory) -> Iterator[SimulatedHistory]:
    """The history, and then others: with the faults a little earlier or later, and half of them with other draws."""
    yield history
    for number in range(1, MOST):
        draws = random.Random(number)
        moved = (replace(each, at=round(max(0.0, each.at + draws.gauss(0, 1.0)), 3)) for each in history.faults)
        seed = history.seed if number % 2 else number
        yield replace(history, seed=seed, faults=tuple(sorted(moved, key=lambda fault: (fault.at, fault.number))))


def find(name: str) -> SimulatedHistory | None:
    """A variant of the recorded history that fails without the fix alone, with as few faults as possible."""
    for variant in islice(variants(recorded(name)), MOST):
        found = play_without_the_fix(name, variant)
        if fails(name, found) and play(variant).failure is None:
            return shrink(found, lambda history: play_without_the_fix(name, history))
    return None


def main() -> int:
    logging.disable(logging.CRITICAL)
    missing = 0
    for name in sys.argv[1:] or REGRESSIONS:
        found = find(name)
        missing += found is None
        print(f"{name}: {'NOT FOUND' if found is None else found.failure}", flush=True)
        if found is not None:
            table = {key: value for key, value in to_json(found).items() if key in ("seed", "shape", "faults")}
            (FOLDER / f"{name}.json").write_text(json.dumps(table, indent=1) + "\n")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
