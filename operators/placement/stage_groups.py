"""Stage groups: replicas whose machines have parts of the newest version run it together until one has all of it.

Placement decides from heartbeats: relays report the chunks that have arrived, replicas whether they can run in stages
and the groups they are in. An order goes to the leader of a group; it opens the stages of the others. A group that has
lost a member gets a new one with the same leader, while the relays of its replicas report its version. Nothing is kept
across a restart: the heartbeats have the groups, and the newest manifest is read again; groups of older versions get no
new members.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from infra.store.model_parts import HeldParts, ModelParts, chunks_in, model_parts
from operators.io.elements import Output
from operators.placement.config import PlacementConfig
from operators.placement.replicas import ReplicaTable
from schemas.records import (
    GroupPlan,
    PolicyVersion,
    RelayArrival,
    RelayStatus,
    Stage,
    StageGroup,
    StageStatus,
    WeightVersion,
)
from schemas.topics import PLANS

log = logging.getLogger(__name__)

KEPT_VERSIONS = 8
Action = Literal["formed", "changed", "failed", "ended"]
HostAndStore = tuple[str, str]
"""Host and store: the folder of weights that a relay fills and replicas read."""


@dataclass(frozen=True, slots=True)
class _Order:
    """A group that was ordered at `at`, and the one that it replaces."""

    group: StageGroup
    replaces: str
    at: float


class StageGroups:
    """Forms stage groups of the replicas in `replicas`; `start` is placement's start number."""

    def __init__(self, config: PlacementConfig, replicas: ReplicaTable, start: int, now: Callable[[], int]) -> None:
        self._config, self._replicas, self._start, self._now = config, replicas, start, now
        self._parts: dict[PolicyVersion, ModelParts] = {}
        """Of the newest versions that can be staged, and of those that groups run: a group may need a new member."""
        self._newest: PolicyVersion | None = None
        self._arrivals: dict[HostAndStore, tuple[RelayArrival, float]] = {}
        self._complete: dict[HostAndStore, frozenset[str]] = {}
        self._staged: dict[int, tuple[StageStatus, float]] = {}
        self._orders: dict[int, _Order] = {}
        """By leader: orders that it has not reported yet."""
        self._led: dict[str, StageGroup] = {}
        self._avoid: dict[int, float] = {}
        """Replicas that failed, and until when they get no stage."""
        self._gone: dict[str, tuple[int, ...]] = {}
        """By group that is led: the replicas that it has lost, and that are avoided."""
        self._count = 0

    # -- records ------------------------------------------------------------------------------------------------------

    def announce(self, manifest: WeightVersion) -> None:
        """Record a published version. One that cannot be staged is loaded as a whole."""
        if not self._config.stage_groups or (self._newest is not None and manifest.version <= self._newest):
            return
        kept = {*sorted(self._parts)[-KEPT_VERSIONS:], *(group.version for group in self._led.values())}
        self._parts = {version: parts for version, parts in self._parts.items() if version in kept}
        self._newest = manifest.version
        try:
            self._parts[manifest.version] = model_parts(manifest)
        except ValueError as error:
            log.info("version %s cannot run in stages: %s", manifest.version, error)

    def record_arrival(self, arrival: RelayArrival, now: float) -> None:
        """Record what has arrived at a relay."""
        self._arrivals[arrival.host, arrival.store] = arrival, now

    def record_relay(self, relay: RelayStatus) -> None:
        """Record the complete versions of a relay."""
        self._complete[relay.host, relay.store] = frozenset(relay.versions)

    def record_stage(self, status: StageStatus, now: float) -> None:
        """Record a replica's part in stage groups."""
        self._staged[status.replica] = status, now

    # -- queries ------------------------------------------------------------------------------------------------------

    def leads(self, replica: int) -> bool:
        """Whether the replica leads a group, or is about to."""
        return replica in self._orders or any(group.replica == replica for group in self._led.values())

    def switches(self) -> list[tuple[int, list[int], int]]:
        """For each group some of whose members have the whole version: its leader, these members, and the number of
        the others, the leader included."""
        found = []
        for group in self._led.values():
            whole = [stage.replica for stage in group.stages[1:] if self._runs(stage.replica, group.version)]
            if whole:
                found.append((group.replica, whole, len(group.stages) - len(whole)))
        return found

    # -- decisions ----------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> list[Output | StageGroup]:
        """The orders of now, and their plans for people."""
        if not self._config.stage_groups:
            return []
        timeout = self._config.heartbeat_timeout_s
        self._staged = {
            replica: (status, at)
            for replica, (status, at) in self._staged.items()
            if now - at <= timeout and self._replicas.incarnation(replica) == status.incarnation
        }
        self._arrivals = {machine: each for machine, each in self._arrivals.items() if now - each[1] <= timeout}
        self._avoid = {replica: until for replica, until in self._avoid.items() if until > now}
        outputs = self._follow(now, timeout)
        outputs += self._repair(now)
        return [*outputs, *self._form(now)]

    def _follow(self, now: float, timeout: float) -> list[Output | StageGroup]:
        """Take the leaders' reports about the groups ordered and led."""
        outputs: list[Output | StageGroup] = []
        for leader, order in list(self._orders.items()):
            status = self._status(leader)
            name = order.group.group
            if status is not None and status.group == name and status.leads:
                del self._orders[leader]
                self._led.pop(order.replaces, None)
                self._gone.pop(order.replaces, None)
                self._led[name] = order.group
            elif status is not None and status.forming == name:
                continue  # members load their parts, which takes as long as their disks and networks need
            elif (status is not None and status.failed == name) or now - order.at > timeout:
                del self._orders[leader]
                reason, lost = "its leader does not reply", tuple[int, ...]()
                if status is not None and status.failed == name:
                    reason, lost = status.error, status.lost
                self._give_up(order.group, lost, now)
                outputs.append(self._plan(order.group, "failed", order.replaces, reason))
        for status, _ in self._staged.values():  # groups of an earlier start of placement
            unknown = status.leads and status.group not in self._led and status.replica not in self._orders
            if unknown and (group := self._reported(status)) is not None:
                self._led[status.group] = group
        for name, group in list(self._led.items()):
            status = self._status(group.replica)
            if status is None or status.group != name:
                del self._led[name]
                self._gone.pop(name, None)
                outputs.append(self._plan(group, "ended", "", "" if status is not None else "its leader is gone"))
        return outputs

    def _repair(self, now: float) -> list[Output | StageGroup]:
        """Order a group with the same leader where a member has been lost, or is about to end."""
        outputs: list[Output | StageGroup] = []
        for name, group in self._led.items():
            status = self._status(group.replica)
            gone = None if status is None else status.gone
            if group.replica in self._orders or not (gone is not None or self._drains(group)):
                continue
            if gone is not None and self._gone.get(name) != gone:
                self._gone[name] = gone
                self._give_up(group, gone, now)
            members = {stage.replica for stage in group.stages}
            holdings = self._holdings(group.version, members)
            pipeline = plan_pipeline(holdings, group.stages[-1].end, group.replica)
            if pipeline is not None:
                outputs += self._order(group.version, pipeline, name, now)
        return outputs

    def _form(self, now: float) -> list[Output | StageGroup]:
        """Order groups of the replicas that are in none."""
        version = self._newest
        if version is None or version not in self._parts:
            return []
        parts = self._parts[version]
        outputs: list[Output | StageGroup] = []
        for pipeline in plan_pipelines(self._holdings(version, set()), len(parts.layers)):
            if len(pipeline) > 1 and self._seconds_left(version, pipeline) >= self._config.stage_min_s:
                outputs += self._order(version, pipeline, "", now)
        return outputs

    def _holdings(self, version: PolicyVersion, members: set[int]) -> dict[int, HeldParts]:
        """The parts of `version` that `members`, and replicas without a group or weights, have."""
        busy = {stage.replica for order in self._orders.values() for stage in order.group.stages}
        busy |= {stage.replica for group in self._led.values() for stage in group.stages}
        found: dict[int, HeldParts] = {}
        if version not in self._parts:
            return found
        for replica, (status, _) in self._staged.items():
            free = replica not in busy and not status.group and self._replicas.version(replica) is None
            if replica in self._avoid or not (replica in members or free):
                continue
            if status.refusal and not (status.leads and replica in members):  # a leader stays it until it ends
                continue
            held = self._held(status, version)
            if held is not None:
                found[replica] = held
        return found

    def _held(self, status: StageStatus, version: PolicyVersion) -> HeldParts | None:
        machine, parts = (status.host, status.store), self._parts[version]
        if str(version) in self._complete.get(machine, ()):
            return HeldParts(True, frozenset(range(len(parts.layers))))
        arrival = self._arrivals.get(machine)
        if arrival is None or arrival[0].version != version:
            return None
        most = 1 + max(max(chunks) for chunks in (parts.ends, *parts.layers))
        return parts.held(chunks_in(arrival[0].chunks, most))

    def _seconds_left(self, version: PolicyVersion, pipeline: Pipeline) -> float:
        """The time until the first replica of `pipeline` has `version`; infinite if that is unknown."""
        found = [float("inf")]
        for stage in pipeline:
            status = self._staged[stage.replica][0]
            arrival = self._arrivals.get((status.host, status.store))
            if str(version) in self._complete.get((status.host, status.store), ()):
                return 0.0
            if arrival is not None and arrival[0].seconds_left >= 0:
                found.append(arrival[0].seconds_left)
        return min(found)

    def _order(
        self, version: PolicyVersion, pipeline: Pipeline, replaces: str, now: float
    ) -> list[Output | StageGroup]:
        self._count += 1
        placed = [(self._staged[each.replica][0], each) for each in pipeline]
        stages = tuple(Stage(at.replica, at.incarnation, at.address, each.first, each.end) for at, each in placed)
        group = StageGroup(f"g{self._start}-{self._count}", version, stages, stages[0].replica, stages[0].incarnation)
        self._orders[group.replica] = _Order(group, replaces, now)
        left = self._seconds_left(version, pipeline)
        action: Action = "changed" if replaces else "formed"
        return [group, self._plan(group, action, replaces, "", left)]

    def _give_up(self, group: StageGroup, lost: tuple[int, ...], now: float) -> None:
        """Avoid the replicas of `group` that failed for a while; without a known one, all of them."""
        for replica in lost or [stage.replica for stage in group.stages]:
            self._avoid[replica] = now + self._config.heartbeat_timeout_s

    def _plan(self, group: StageGroup, action: Action, replaces: str, note: str, left: float = -1.0) -> Output:
        seconds = -1.0 if left == float("inf") else round(left, 3)
        record = GroupPlan(group.group, group.version, group.stages, action, replaces, seconds, note, self._now())
        return Output(PLANS, group.group, record)

    def _reported(self, leader: StageStatus) -> StageGroup | None:
        """The group that `leader` reports, from the heartbeats of its members; None before all have reported."""
        members = sorted(
            (status for status, _ in self._staged.values() if status.group == leader.group and not status.leads),
            key=lambda status: status.first,
        )
        if leader.version is None:
            return None
        stages = tuple(
            Stage(each.replica, each.incarnation, each.address, each.first, each.end) for each in (leader, *members)
        )
        follows = all(after.first == before.end for before, after in pairwise(stages))
        return StageGroup(leader.group, leader.version, stages, leader.replica, leader.incarnation) if follows else None

    def _drains(self, group: StageGroup) -> bool:
        """Whether a member of `group` is about to end: until then its KV can be fetched."""
        statuses = (self._status(stage.replica) for stage in group.stages[1:])
        return any(status is not None and status.refusal for status in statuses)

    def _status(self, replica: int) -> StageStatus | None:
        found = self._staged.get(replica)
        return None if found is None else found[0]

    def _runs(self, replica: int, version: PolicyVersion) -> bool:
        """Whether the replica has the whole `version`; a leader's is that of its group."""
        return self._replicas.version(replica) == version and not self.leads(replica)


MAX_STAGES = 16


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """`replica` runs layers `first` to `end` (exclusive)."""

    replica: int
    first: int
    end: int


Pipeline = tuple[PlannedStage, ...]


def plan_pipelines(holdings: Mapping[int, HeldParts], layers: int) -> list[Pipeline]:
    """Disjoint pipelines of the replicas with these parts of a model of `layers` layers, shortest first.

    Pipelines of few stages come first, so that the replicas form as many as possible (λScale, arXiv 2502.09922, §4.3:
    execution pipelines across receivers with complementary blocks); within a pipeline the stages are as even as the
    parts allow.
    """
    left = dict(sorted(holdings.items()))
    found: list[Pipeline] = []
    while (pipeline := plan_pipeline(left, layers)) is not None:
        found.append(pipeline)
        for stage in pipeline:
            del left[stage.replica]
    return found


def plan_pipeline(holdings: Mapping[int, HeldParts], layers: int, leader: int | None = None) -> Pipeline | None:
    """The pipeline with the fewest stages and, of those, the most even one; None if the replicas do not cover it.

    With `leader` that replica leads, because it has the requests.
    """
    leaders = [replica for replica, held in holdings.items() if held.ends and leader in (None, replica)]
    chains = [chain for replica in leaders if (chain := _chain(replica, holdings, layers)) is not None]
    plans = [_even(chain, holdings, layers) for chain in chains if len(chain) <= MAX_STAGES]
    return min(plans, key=lambda stages: (len(stages), max(stage.end - stage.first for stage in stages)), default=None)


def _chain(leader: int, holdings: Mapping[int, HeldParts], layers: int) -> list[int] | None:
    """Replicas that cover all layers, beginning with `leader`: each continues where the one before ends, and the one
    that reaches furthest is next."""
    chain, reached = [leader], _reach(holdings[leader], 0)
    while reached < layers:
        others = [(each, _reach(held, reached)) for each, held in holdings.items() if each not in chain]
        best, end = max(others, key=lambda other: other[1], default=(-1, reached))
        if end <= reached:
            return None
        chain.append(best)
        reached = end
    return chain


def _reach(held: HeldParts, first: int) -> int:
    """The first layer from `first` on that `held` lacks."""
    end = first
    while end in held.layers:
        end += 1
    return end


def _even(chain: Sequence[int], holdings: Mapping[int, HeldParts], layers: int) -> Pipeline:
    """Stages of the replicas of `chain`, in order, whose longest is as short as possible. A leader may have none."""
    costs: list[dict[int, tuple[int, tuple[int, ...]]]] = [{0: (0, (0,))}]
    for replica in chain:
        reachable: dict[int, tuple[int, tuple[int, ...]]] = {}
        for first, (longest, cuts) in costs[-1].items():
            for end in range(first, min(layers, _reach(holdings[replica], first)) + 1):
                cost = max(longest, end - first), (*cuts, end)
                if end not in reachable or cost < reachable[end]:
                    reachable[end] = cost
        costs.append(reachable)
    cuts = costs[-1][layers][1]
    stages = [PlannedStage(replica, *cut) for replica, cut in zip(chain, pairwise(cuts), strict=True)]
    return tuple(stage for place, stage in enumerate(stages) if place == 0 or stage.end > stage.first)
