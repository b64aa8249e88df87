"""A replica's part in stage groups: it leads a group that placement has formed, until its machine has the version.

Groups are opened in a thread, because members load their layers meanwhile. The engine changes its runner in the thread
that steps it, between two steps. A trajectory never sees two versions: a group computes one, and the engine leaves it
only while it is empty, or for the same version as a whole.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from infra.machine import machine_name
from infra.models.partial_weights import PartsMissing
from infra.store import names
from infra.store.errors import VersionGone
from infra.store.weight_store import WeightStore
from operators.rollout.runner import RunnerLost
from operators.rollout.staged.member import StageMember, StageRefused
from operators.rollout.staged.pipeline import GroupFailed, StagePipeline
from operators.rollout.staged.service import StageService
from operators.rollout.staged.stage import StageModel
from operators.rollout.staged.staged_runner import StagedKV, StagedRunner
from schemas.records import PolicyVersion, StageGroup, StageStatus, WeightVersion

log = logging.getLogger(__name__)

DEAD_END_S = 10.0
"""Seconds for which a group that has lost replicas waits for a version that is not arriving."""


class ReplicaStaging:
    """Stage groups of one replica, over its `member`; `weights` is the store of its machine."""

    def __init__(self, member: StageMember, weights: WeightStore, service: StageService) -> None:
        self.member, self._weights, self._service, self._clock = member, weights, service, time.monotonic
        self._engine = member.engine
        self._pool = ThreadPoolExecutor(1, "form stage group")
        self._forming: Future[tuple[StageModel, StagePipeline]] | None = None
        self._next: StageGroup | None = None
        self._current: StageGroup | None = None
        self._led: tuple[StageGroup, StagePipeline] | None = None
        self._failed = self._error = ""
        self._lost: tuple[int, ...] = ()
        """Of the last order that failed: its group, the reason, and the replicas that failed."""
        self._reported: RunnerLost | None = None
        """The loss of the group that is led, which heartbeats report."""
        self._hopeless_since: float | None = None
        self.draining = False
        """Whether its process is about to end: placement then forms the group again without it."""
        service.add(member)

    @property
    def serving(self) -> bool:
        """Whether a leader elsewhere computes with a stage here."""
        return bool(self.member.serving[0])

    def announce(self, manifest: WeightVersion) -> None:
        """Record the manifest of a published version."""
        self.member.announce(manifest)

    def may_load(self, version: PolicyVersion) -> bool:
        """Whether the engine, which is empty, may load `version`: not older than that of its group, nor another one
        than a stage here uses, and none while such a stage uses the engine's memory."""
        claims = self.member.claims
        if self._led is None:
            return claims.version in (None, version) and not claims.shared_besides("")
        order = self._led[0]
        free = claims.version_besides(order.group) in (None, version) and not claims.shared_besides(order.group)
        return free and version > order.version

    def order(self, group: StageGroup) -> None:
        """Form `group` and lead it; a group that is led continues until then."""
        self._next = group

    def advance(self) -> bool:
        """Carry out what is due, between two steps; returns whether something has changed."""
        changed = False
        if self._next is not None and self._forming is None:
            order, self._next = self._next, None
            self._current = order
            self._forming = self._pool.submit(self._open, order)
            changed = True
        changed |= self._complete()
        if self._forming is not None and self._forming.done():
            self._use(self._forming)
            self._forming = None
            changed = True
        if self._engine.lost is not self._reported:
            self._reported, changed = self._engine.lost, True
        return changed

    def dead_end(self) -> str:
        """Why the group that is led has ended for good: it has lost replicas and its version does not arrive. Else "".

        A relay abandons a version for a newer one. Without its parts the group is neither formed again nor made whole.
        """
        if self._led is None or self._engine.lost is None or self._forming is not None or self._may_arrive():
            self._hopeless_since = None
            return ""
        if self._hopeless_since is None:
            self._hopeless_since = self._clock()
        if self._clock() - self._hopeless_since < DEAD_END_S:
            return ""
        return f"{self._engine.lost}, and weight version {self._led[0].version} no longer arrives"

    def _may_arrive(self) -> bool:
        """Whether this machine has the version of the group that is led, or a part of it."""
        assert self._led is not None
        version, store = self._led[0].version, self.member.store
        return (store / f"{version}{names.PARTIAL}").exists() or (store / names.weight_file(version)).exists()

    def leave(self) -> None:
        """End the group that is led; the engine is empty."""
        if self._led is not None:
            self._engine.leave_stages()
            self._end()

    def status(self, now: int) -> StageStatus:
        """The heartbeat record at `now` (Unix milliseconds)."""
        member, led, current, lost = self.member, self._led, self._current, self._engine.lost
        group, layers = member.serving
        version, gone = member.claims.version, None
        if led is not None:
            stage = led[0].stages[0]
            group, layers, version = led[0].group, range(stage.first, stage.end), led[0].version
            gone = None if lost is None else _lost_of(lost)
        return StageStatus(
            replica=member.replica,
            incarnation=member.incarnation,
            host=machine_name(),
            store=str(member.store),
            address=self._service.transfers.address,
            refusal=member.refusal or ("its process is about to end" if self.draining else ""),
            version=version,
            group=group,
            leads=led is not None,
            first=layers.start,
            end=layers.stop,
            failed=self._failed,
            error=self._error,
            lost=self._lost,
            sent_at=now,
            forming=None if self._forming is None or current is None else current.group,
            gone=gone,
        )

    def close(self) -> None:
        """End the group and stop."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._led is not None:
            self._led[1].close()

    def _open(self, order: StageGroup) -> tuple[StageModel, StagePipeline]:
        """Load the leader's part and connect the members. Raises GroupFailed."""
        engine, first = self._engine, order.stages[0]
        rows, context = engine.slots, engine.context
        try:
            layers = range(first.first, first.end)
            own = self.member.load(order.group, order.version, layers, rows, context, ends=True)
        except (StageRefused, PartsMissing, ValueError) as error:
            raise GroupFailed(f"replica {self.member.replica}: {error}") from error
        try:
            return own, StagePipeline(self._service, order, rows, context)
        except BaseException:
            self.member.end(order.group)
            raise

    def _use(self, formed: Future[tuple[StageModel, StagePipeline]]) -> None:
        """Continue with a group that was formed, if the engine still needs it."""
        order = self._current
        assert order is not None
        try:
            own, pipeline = formed.result()
        except GroupFailed as error:
            self._fail(order.group, error)
            return
        engine = self._engine
        if engine.version not in (None, order.version) or (engine.version is not None and not engine.staged):
            pipeline.close()
            self.member.end(order.group)
            return
        assert engine.modules is not None
        try:
            runner, kv = StagedRunner(engine.modules, own, pipeline), StagedKV(own, pipeline, order.version)
            engine.relocate(runner, kv, order.version)
        except RunnerLost as error:
            self._fail(order.group, error)
            pipeline.close()
            self.member.end(order.group)
            return
        self._end()
        self._led = order, pipeline
        log.info(
            "replica %d leads group %s of %d stages under version %s",
            self.member.replica,
            order.group,
            len(order.stages),
            order.version,
        )

    def _complete(self) -> bool:
        """Run the whole version here, once this machine has it; the requests continue with their KV."""
        if self._led is None or self._led[0].version not in self._weights.versions():
            return False
        order = self._led[0]
        began = time.monotonic()
        with suppress(VersionGone), self._weights.pin(order.version) as file:
            requests = self._engine.status().running
            self._engine.complete(file, order.version)
            self._end()
            log.info(
                "replica %d has version %s complete: %d requests continue without group %s, after %.2f s",
                self.member.replica,
                order.version,
                requests,
                order.group,
                time.monotonic() - began,
            )
            return True
        return False

    def _fail(self, group: str, error: RunnerLost) -> None:
        log.warning("group %s: %s", group, error)
        self._failed, self._error = group, str(error)[:1000]
        self._lost = _lost_of(error)

    def _end(self) -> None:
        """Close the group that is led, whose KV is no longer needed."""
        if self._led is not None:
            order, pipeline = self._led
            pipeline.close()
            self.member.end(order.group)
            self._led = None


def _lost_of(error: RunnerLost) -> tuple[int, ...]:
    """The replicas that are known to be gone."""
    return error.lost if isinstance(error, GroupFailed) else ()
