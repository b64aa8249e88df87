"""Planted defects of relays, KV transfers, trims and upgrades."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import pytest
from patches import after

from infra.store.incoming_version import IncomingVersion
from infra.transport import weight_pusher
from infra.transport.fetch import Fetch
from infra.transport.peer import Peer
from infra.transport.relay_node import RelayNode
from infra.transport.weight_pusher import WeightPusher
from operators.relay.relay import RelayFold
from operators.rollout.engine import KV
from operators.rollout.waiting_assignments import IncomingKV
from pipelines.trim import plan
from pipelines.trim.cuts import Need, Needs
from schemas import codec
from schemas.records import Assignment, PolicyVersion, RelayChain


def chunk_is_accepted_without_its_checksum(patch: pytest.MonkeyPatch) -> None:
    """A receiver does not compare a chunk with its CRC-32C."""
    after(patch, Peer, "receive_chunk", lambda self, found: (found[0], True))


def incomplete_version_is_sealed(patch: pytest.MonkeyPatch) -> None:
    """A version is sealed once all its chunks but the last have arrived."""
    after(patch, Fetch, "run", lambda self, found, *args: found or len(self._buffer.missing()) == 1)
    seal = IncomingVersion.seal
    patch.setattr(IncomingVersion, "seal", lambda self, expected=None: seal(self))
    ended = RelayNode._superseded
    patch.setattr(
        RelayNode,
        "_superseded",
        lambda self, blob, buffer: ended(self, blob, buffer) or len(buffer.missing()) == 1,
    )


def kv_of_an_older_lease_is_kept(patch: pytest.MonkeyPatch) -> None:
    """A replica keeps the KV that it fetched for a trajectory, and uses it when that returns under a later lease."""
    fetch = IncomingKV.fetch

    def once(self: IncomingKV, assignment: Assignment) -> None:
        if assignment.trajectory_id not in self._fetches:
            fetch(self, assignment)

    def take(self: IncomingKV, assignment: Assignment, loaded: PolicyVersion | None) -> KV | None:
        _, future = self._fetches.get(assignment.trajectory_id, (0, None))
        if assignment.kv is None or future is None or not future.done() or future.exception() is not None:
            return None
        return KV(assignment.kv.tokens, future.result())

    patch.setattr(IncomingKV, "fetch", once)
    patch.setattr(IncomingKV, "take", take)
    patch.setattr(IncomingKV, "discard", lambda self, trajectory_id: None)


def later_chains_are_ignored(patch: pytest.MonkeyPatch) -> None:
    """A relay follows the first chain that it reads: it does not find the others after their restarts."""
    set_chain = RelayNode.set_chain

    def first(self: RelayNode, chain: RelayChain) -> None:
        if self.chain is None:
            set_chain(self, chain)

    patch.setattr(RelayNode, "set_chain", first)


def version_is_offered_once(patch: pytest.MonkeyPatch) -> None:
    """A trainer that could not deliver a version to its master does not try again."""
    push: Callable[..., None] = WeightPusher._push

    def once(self: WeightPusher, address: str, manifest: Any) -> None:
        try:
            push(self, address, manifest)
        finally:
            self._delivered = (address, manifest.version)

    patch.setattr(WeightPusher, "_push", once)
    patch.setattr(weight_pusher, "OFFER_AGAIN_S", float("inf"))


def relay_forgets_awaited_manifests(patch: pytest.MonkeyPatch) -> None:
    """A start of a relay does not read the manifests again whose versions it lacks."""
    after(
        patch,
        RelayFold,
        "checkpoint",
        lambda self, made, positions: type(made)(dict(positions), state=made.state),
    )


def trim_point_of_another_trim_counts(patch: pytest.MonkeyPatch) -> None:
    """The second of two trims at once deletes records although its point, of a number that exists, counts nowhere."""
    patch.setattr(plan, "trim_points", lambda client, run: [ANY])


def trim_writes_no_trim_point(patch: pytest.MonkeyPatch) -> None:
    """A trim deletes records without a mark of what they were."""

    class Silent:
        def __init__(self, client: Any) -> None:
            pass

        def __enter__(self) -> Silent:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def send(self, *args: Any, **named: Any) -> None:
            pass

        def flush(self, timeout_s: float) -> None:
            pass

    patch.setattr(plan, "open_producer", Silent)
    trim_point_of_another_trim_counts(patch)  # nor does it miss its point


def trim_ignores_what_roles_need(patch: pytest.MonkeyPatch) -> None:
    """A trim deletes records that a role has not read."""
    patch.setattr(Needs, "of", lambda self, place: Need(10**9, "nobody"))


def earlier_versions_of_records_are_not_read(patch: pytest.MonkeyPatch) -> None:
    """After an upgrade of the run the records of the earlier release cannot be decoded."""
    patch.setattr(codec, "_EARLIER", {})


TRANSFER_MUTATIONS = (
    chunk_is_accepted_without_its_checksum,
    incomplete_version_is_sealed,
    kv_of_an_older_lease_is_kept,
    later_chains_are_ignored,
    version_is_offered_once,
    relay_forgets_awaited_manifests,
    trim_writes_no_trim_point,
    trim_ignores_what_roles_need,
    earlier_versions_of_records_are_not_read,
)
