"""Planted defects of the steps of the roles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from patches import after

from operators.evaluation.evaluate_versions import EvaluationFold
from operators.experience.make_batches import _Buffering
from operators.experience.settlements import SettlementLedger
from operators.io.commits import LedgerFloors
from operators.io.elements import ReceivedRecord
from operators.io.ledger import TrajectoryLedger
from operators.io.pending import PendingOffsets
from operators.io.validation import ManifestOrder
from operators.placement import place_trajectories
from operators.placement.inbox_ledger import restore_inboxes
from operators.placement.pauses import RunPause
from operators.placement.place_trajectories import EndedOwners, PlacementFold
from operators.placement.tracking import TrajectoryTracker
from operators.placement.work_table import Leases
from operators.prompts.draw_prompts import PromptFold
from operators.rollout import waiting_assignments
from operators.rollout.replica import Replica
from operators.rollout.running_request import RunningRequest
from operators.score.score_trajectories import _Scoring
from operators.trainer.emulate_training import _EmulatedTraining
from operators.trainer.manifest_history import PublishedBatches
from schemas.records import Assignment, Pause


def placement_does_not_fence(patch: pytest.MonkeyPatch) -> None:
    """Placement gives lost work to another replica without fencing its owner."""
    patch.setattr(place_trajectories, "fence", lambda clients, group: None)


def lease_counter_is_lost(patch: pytest.MonkeyPatch) -> None:
    """A start of placement mints leases from 1 again."""
    init = Leases.__init__
    patch.setattr(Leases, "__init__", lambda self, last=0: init(self, 0))


def placement_decides_before_it_has_caught_up(patch: pytest.MonkeyPatch) -> None:
    """A start of placement dispatches before it has read what was written before."""
    fold = PlacementFold.fold
    patch.setattr(PlacementFold, "fold", lambda self, polled: fold(self, replace(polled, caught_up=True)))


def placement_forgets_what_is_settled(patch: pytest.MonkeyPatch) -> None:
    """Placement reads past a Settled without recording it."""
    settle, count = TrajectoryTracker.settle, [0]

    def changed(self: TrajectoryTracker, received: Any, settled: Any) -> Any:
        count[0] += 1
        return [] if count[0] % 7 == 0 else settle(self, received, settled)

    patch.setattr(TrajectoryTracker, "settle", changed)


def pending_offsets_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The low-water mark passes records that are still needed."""
    patch.setattr(PendingOffsets, "low_water", lambda self, positions: dict(positions))


def prompt_number_is_lost(patch: pytest.MonkeyPatch) -> None:
    """The note of prompts is one prompt behind."""
    after(
        patch,
        PromptFold,
        "checkpoint",
        lambda self, made, positions: replace(made, state={**made.state, "number": max(0, made.state["number"] - 1)}),
    )


def prompts_ignore_their_note(patch: pytest.MonkeyPatch) -> None:
    """A start of prompts begins with the first question again."""
    after(
        patch, PromptFold, "checkpoint", lambda self, made, positions: replace(made, state={**made.state, "tasks": []})
    )


def ledger_floor_is_too_high(patch: pytest.MonkeyPatch) -> None:
    """A start reads too little of its own output, and a record is delivered twice."""
    after(patch, LedgerFloors, "offsets", lambda self, made, oldest: self._known)
    after(
        patch,
        _Scoring,
        "checkpoint",
        lambda self, made, positions: replace(
            made, low_water={place: max(0, offset - 4) for place, offset in made.low_water.items()}
        ),
    )


def score_skips_inputs(patch: pytest.MonkeyPatch) -> None:
    """Score's low-water mark is two offsets ahead."""
    after(
        patch,
        _Scoring,
        "checkpoint",
        lambda self, made, positions: replace(made, low_water={p: o + 2 for p, o in made.low_water.items()}),
    )


def batch_number_is_not_saved(patch: pytest.MonkeyPatch) -> None:
    """A start of the buffer numbers its batches from 0."""
    after(
        patch, _Buffering, "checkpoint", lambda self, made, positions: replace(made, state={**made.state, "batch": 0})
    )


def buffer_forgets_what_it_holds(patch: pytest.MonkeyPatch) -> None:
    """The buffer's low-water mark ignores the groups that wait in it."""
    after(
        patch,
        _Buffering,
        "checkpoint",
        lambda self, made, positions: replace(made, low_water={**made.low_water, **positions}),
    )


def settlement_ledger_is_empty_after_a_start(patch: pytest.MonkeyPatch) -> None:
    """The buffer does not read its Settled records back, and its note has no marks."""

    def restored(cls: Any, restored: Any, layout: Any) -> Any:
        return SettlementLedger(TrajectoryLedger(layout.partitions, None))

    patch.setattr(SettlementLedger, "restored", classmethod(restored))


def replica_mixes_versions(patch: pytest.MonkeyPatch) -> None:
    """A trajectory keeps the version with which it began, whatever generated the rest."""
    patch.setattr(Replica, "_interrupt", lambda self: None)
    spans = RunningRequest.spans_of

    def changed(self: RunningRequest, count: int) -> Any:
        found = spans(self, count)
        return found[:-1] if len(found) > 1 else tuple(replace(span, length=span.length - 1) for span in found)

    patch.setattr(RunningRequest, "spans_of", changed)


def resumed_tokens_are_lost(patch: pytest.MonkeyPatch) -> None:
    """A resumed trajectory continues without the last recorded token."""
    from operators.rollout import replica

    request_of = replica.request_of

    def changed(assignment: Any, kv: Any = None) -> Any:
        request = request_of(assignment, kv)
        partial = request.partial
        if partial is None or len(partial.token_ids) < 2:
            return request
        ids = partial.token_ids.copy()
        ids[:-1] = ids[1:]
        return replace(request, partial=replace(partial, token_ids=ids))

    patch.setattr(replica, "request_of", changed)


def trainer_saves_a_batch_it_has_not_trained(patch: pytest.MonkeyPatch) -> None:
    """The trainer's note is one batch ahead."""
    after(
        patch,
        _EmulatedTraining,
        "checkpoint",
        lambda self, made, positions: replace(
            made,
            state={**made.state, "trained": {**made.state["trained"], "number": made.state["trained"]["number"] + 1}},
        ),
    )


def trainer_publishes_batches_of_another_parent(patch: pytest.MonkeyPatch) -> None:
    """A restarted trainer names the last version of its predecessor as published, and skips what it covers."""
    init = PublishedBatches.__init__
    patch.setattr(PublishedBatches, "__init__", lambda self, epoch, last=-1: init(self, epoch, last + 1))


def evaluation_repeats_its_numbers(patch: pytest.MonkeyPatch) -> None:
    """The note of evaluation has no prompt number."""
    after(
        patch,
        EvaluationFold,
        "checkpoint",
        lambda self, made, positions: replace(
            made, state={**made.state, "evaluated": [0, *made.state["evaluated"][1:]]}
        ),
    )


def evaluation_forgets_open_rounds(patch: pytest.MonkeyPatch) -> None:
    """The note of evaluation has no open rounds."""

    def without_rounds(self: EvaluationFold, made: Any, positions: Any) -> Any:
        return replace(made, state={**made.state, "rounds": {}})

    after(patch, EvaluationFold, "checkpoint", without_rounds)


def placement_ignores_pauses(patch: pytest.MonkeyPatch) -> None:
    """Placement assigns fresh work while the run is paused."""
    patch.setattr(RunPause, "active", False)


def pause_is_lost_at_a_start(patch: pytest.MonkeyPatch) -> None:
    """A start of placement ignores the pause that was written before it."""
    handle = PlacementFold._handle

    def changed(self: PlacementFold, received: Any, now: float) -> Any:
        ignored = isinstance(received.record, Pause) and not self._ready
        return [] if ignored else handle(self, received, now)

    patch.setattr(PlacementFold, "_handle", changed)


def start_forgets_the_newest_manifest(patch: pytest.MonkeyPatch) -> None:
    """Each start compares manifests anew: after the late one of a paused trainer it rejects all later ones."""
    init = ManifestOrder.__init__
    patch.setattr(ManifestOrder, "__init__", lambda self, state=None: init(self))


def ended_replica_is_lost_at_once(patch: pytest.MonkeyPatch) -> None:
    """Placement assigns the work of an ended replica again before it has read the replica's last records."""
    patch.setattr(EndedOwners, "fully_read", lambda self, ended, positions: set(ended))


def question_of_a_version_to_come_fails(patch: pytest.MonkeyPatch) -> None:
    """A replica rejects a question whose version has not arrived on its machine yet."""
    patch.setattr(waiting_assignments, "_may_arrive", lambda assignment, available: False)


def old_lease_is_accepted(patch: pytest.MonkeyPatch) -> None:
    """A start of placement takes the assignment with the lowest lease for that of the present owner."""

    def oldest(ledger: tuple[ReceivedRecord, ...], *rest: Any) -> Any:
        lowest: dict[str, int] = {}
        for record in (received.record for received in ledger if isinstance(received.record, Assignment)):
            name = record.trajectory_id
            lowest[name] = min(record.lease, lowest.get(name, record.lease))
        return restore_inboxes(
            tuple(
                received
                for received in ledger
                if not isinstance(received.record, Assignment)
                or received.record.lease == lowest[received.record.trajectory_id]
            ),
            *rest,
        )

    patch.setattr("operators.placement.tracking.restore_inboxes", oldest)


STEP_MUTATIONS = (
    old_lease_is_accepted,
    start_forgets_the_newest_manifest,
    ended_replica_is_lost_at_once,
    placement_ignores_pauses,
    pause_is_lost_at_a_start,
    placement_does_not_fence,
    lease_counter_is_lost,
    placement_decides_before_it_has_caught_up,
    placement_forgets_what_is_settled,
    pending_offsets_are_forgotten,
    prompt_number_is_lost,
    prompts_ignore_their_note,
    ledger_floor_is_too_high,
    score_skips_inputs,
    batch_number_is_not_saved,
    buffer_forgets_what_it_holds,
    settlement_ledger_is_empty_after_a_start,
    replica_mixes_versions,
    resumed_tokens_are_lost,
    trainer_saves_a_batch_it_has_not_trained,
    trainer_publishes_batches_of_another_parent,
    evaluation_repeats_its_numbers,
    evaluation_forgets_open_rounds,
    question_of_a_version_to_come_fails,
)
