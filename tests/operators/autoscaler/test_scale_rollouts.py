"""The autoscaler's step: what it observes, when it decides, and how a decision is carried out once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from in_memory_log import Log, Shard
from record_factories import settled, shard, version

from operators.autoscaler.actuators import ActuatorFailed
from operators.autoscaler.config import AutoscalingConfig
from operators.autoscaler.load import Load
from operators.autoscaler.scale_rollouts import ScaleRollouts, report_decisions
from operators.io.config import TopicInput
from schemas.records import Metric, RelayStatus, ReplicaStatus, ScalingDecision, ScalingOutcome
from schemas.topics import DEAD_LETTERS, DECISION, METRICS, PAUSE, PLACEMENT, REPLICAS, SCALING, SETTLED

CONFIG = AutoscalingConfig(observe_s=10.0, stable_s=20.0, cooldown_s=60.0, retry_s=15.0, maximum=4)
INPUTS = (
    TopicInput(METRICS, start="latest", keys=("trainer", PAUSE, PLACEMENT)),
    TopicInput(REPLICAS, start="latest"),
    TopicInput(SETTLED, start="latest"),
    TopicInput(SCALING, keys=(DECISION,)),
)


@dataclass
class Recorded:
    """An actuator that records what it is asked for, and fails with the first of `errors`."""

    errors: list[str] = field(default_factory=list)
    asked: list[tuple[int, int]] = field(default_factory=list)
    machines: Sequence[str] = ()
    name: str = "recorded"

    def apply(self, decision: ScalingDecision, machines: Sequence[str], timeout_s: float) -> None:
        self.asked.append((decision.number, decision.target))
        self.machines = machines
        if self.errors:
            raise ActuatorFailed(self.errors.pop(0))


class Autoscaler:
    """The role on a log in memory, of a run that begins with two processes."""

    def __init__(self, errors: Sequence[str] = (), **changes: Any) -> None:
        self.log, self.now, self.wall_ms = Log(), 1000.0, 5_000_000
        self.unread: frozenset[str] = frozenset()
        self.actuator = Recorded(list(errors))
        self.step = ScaleRollouts(replace(CONFIG, **changes), self.actuator, 2, 4, timeout_s=30.0)
        self.shard = Shard(self.log, shard("autoscaler", *INPUTS), self._restore, report_decisions)
        self.shard.start()

    def _restore(self, restored: Any) -> Any:
        made = self.step.restore(restored, lambda: self.now, lambda: self.wall_ms)
        fold = made.fold
        made.fold = lambda polled: fold(replace(polled, unread=self.unread))  # type: ignore[method-assign]
        return made

    def beat(self, processes: int, **changes: Any) -> None:
        for number in range(processes):
            fields = {"replica": number, "process": number, "incarnation": 1, "state": "running", "running": 3}
            self.log.append(REPLICAS, _status(**{**fields, **changes}), f"rollout-{number}")

    def train(self, idle: float) -> None:
        values = {"trainer/idle_ratio": idle, "time/wait": 60 * idle, "time/update": 60 * (1 - idle)}
        self.log.append(METRICS, Metric("trainer", 1, values, 0), "trainer")

    def run(self, seconds: int, processes: int = 2, idle: float | None = 0.5) -> None:
        """Pass `seconds` of time in which `processes` beat and the trainer waits for a share `idle` of its time."""
        for _ in range(seconds // 5):
            self.now += 5
            self.beat(processes)
            if idle is not None:
                self.train(idle)
            self.turn()

    def turn(self) -> None:
        self.shard.turn()
        self.shard.commit()
        asking = self.shard.fold._execution._asking  # type: ignore[union-attr]
        if asking is not None:
            asking[1].exception(60)  # so that the next turn sees its end

    def restart(self, on_another_machine: bool = False) -> None:
        """Kill the process, and start it again."""
        if on_another_machine:
            self.now, self.wall_ms = self.now - 900.0, self.wall_ms + 10**9
        self.shard.start()

    @property
    def decisions(self) -> list[ScalingDecision]:
        return [each for each in self.log.rows(SCALING) if isinstance(each, ScalingDecision)]

    @property
    def outcomes(self) -> list[ScalingOutcome]:
        return [each for each in self.log.rows(SCALING) if isinstance(each, ScalingOutcome)]


def _status(**changes: Any) -> ReplicaStatus:
    load = {"waiting": 0, "capacity": 8, "kv_used": 0, "kv_capacity": 9, "tokens_generated": 0, "step_seconds": 0.0}
    return ReplicaStatus(**{"policy_version": version(0), **load, "host": "h", "pid": 1, "sent_at": 0, **changes})


def test_autoscaler_rejects_decisions_that_it_has_not_made() -> None:
    scaler = Autoscaler()
    foreign = ScalingDecision(2**52, "queue", 2, 2, 3, "", False, 0)
    for each in (foreign, replace(foreign, number=1), replace(foreign, number=0, target=10**9)):
        scaler.log.append(SCALING, each, DECISION)
    scaler.run(40)
    assert scaler.actuator.asked == [(1, 4)]
    reasons = [letter.reason for letter in scaler.log.rows(DEAD_LETTERS)]
    assert [reason.split(" is not ")[0].split(",")[0] for reason in reasons] == [
        f"decision {2**52} was not made by the autoscaler",
        "decision 1 was not made by the autoscaler",
        "target 1000000000",
    ]


def test_absurd_heartbeat_does_not_hide_a_replica() -> None:
    load = Load(30.0, 20.0)
    beat = {"replica": 0, "process": 0, "state": "running", "running": 3}
    seen = []
    for now, incarnation in ((0.0, 10**9), (5.0, 1), (40.0, 1), (45.0, 10**9), (50.0, 1), (75.0, 1)):
        load.record(_status(**beat, incarnation=incarnation), now)
        seen.append(load.observe(now, 0, None).requests)
    assert seen == [3] * 6
    assert load._replicas[0][1] == 75.0


def test_autoscaler_decides_requests_once_and_confirms() -> None:
    scaler = Autoscaler()
    scaler.run(40)
    (decision,) = scaler.decisions
    assert (decision.number, decision.running, decision.before, decision.target) == (1, 2, 2, 4)
    assert decision.reason == "the trainer waits 50 % of its time, above 20 %"
    assert scaler.actuator.asked == [(1, 4)]
    assert scaler.outcomes == []
    scaler.run(30, processes=4, idle=0.1)
    assert [(each.number, each.running, each.error) for each in scaler.outcomes] == [(1, 4, "")]
    assert scaler.actuator.asked == [(1, 4)]
    assert len(scaler.decisions) == 1


def test_autoscaler_waits_for_its_cooldown() -> None:
    scaler = Autoscaler(max_step=1)
    scaler.run(200, processes=3)
    first, second = (each.decided_at for each in scaler.decisions)
    assert first == second  # the clock of the day stands still: it decides nothing
    assert [each.target for each in scaler.decisions] == [3, 4]


def test_killed_autoscaler_continues_its_cooldown_elsewhere() -> None:
    scaler = Autoscaler(max_step=1)
    scaler.run(30)
    assert [each.target for each in scaler.decisions] == [3]
    scaler.restart(on_another_machine=True)
    scaler.run(45, processes=3)
    assert [each.target for each in scaler.decisions] == [3]
    scaler.run(30, processes=3)
    assert [each.target for each in scaler.decisions] == [3, 4]


def test_killed_autoscaler_repeats_a_decision_without_an_outcome() -> None:
    scaler = Autoscaler()
    scaler.run(40)
    scaler.restart()
    scaler.run(10)
    assert scaler.actuator.asked == [(1, 4), (1, 4)]  # the same number of processes: it changes nothing
    assert len(scaler.decisions) == 1
    scaler.run(10, processes=4)
    scaler.restart()
    scaler.run(10, processes=4)
    assert scaler.actuator.asked == [(1, 4), (1, 4)]
    assert len(scaler.outcomes) == 1


def test_decision_that_was_not_committed_is_not_carried_out() -> None:
    scaler = Autoscaler()
    scaler.run(20)
    scaler.now += 10
    scaler.beat(2)
    scaler.train(0.5)
    assert any(isinstance(output.record, ScalingDecision) for output in scaler.shard.turn())
    scaler.restart()  # before the commit
    scaler.run(15)
    assert (scaler.decisions, scaler.actuator.asked) == ([], [])
    scaler.run(15)
    assert [each.number for each in scaler.decisions] == [1]


def test_failed_actuator_is_named_once_and_tried_again() -> None:
    scaler = Autoscaler(errors=["403 Forbidden", "403 Forbidden"])
    scaler.run(90)
    assert [(each.actuator, each.error, each.running) for each in scaler.outcomes] == [("recorded", "403 Forbidden", 2)]
    assert len(scaler.actuator.asked) == 3
    scaler.run(20, processes=4)
    assert scaler.outcomes[-1].error == ""


def test_number_that_others_have_changed_is_asked_for_again() -> None:
    scaler = Autoscaler()
    scaler.run(40)
    scaler.run(10, processes=4, idle=0.1)
    scaler.run(40, processes=2, idle=0.1)  # as when pods are replaced: their heartbeats are too old for 10 s
    scaler.run(40, processes=4, idle=0.1)
    assert scaler.actuator.asked == [(1, 4)]
    scaler.run(55, processes=2, idle=0.1)  # `kubectl apply` has set the number of the manifest
    assert scaler.actuator.asked == [(1, 4), (1, 4)]
    scaler.run(10, processes=4, idle=0.1)
    scaler.restart()
    scaler.run(15, processes=2, idle=0.1)
    assert len(scaler.actuator.asked) == 2
    scaler.run(10, processes=2, idle=0.1)
    assert len(scaler.actuator.asked) == 3
    assert [each.error for each in scaler.outcomes] == [""]


def test_request_without_effect_is_reported_once_and_repeated() -> None:
    scaler = Autoscaler()
    scaler.run(40)
    scaler.run(130, processes=3, idle=0.1)
    assert scaler.actuator.asked == [(1, 4)] * 3
    assert [(each.number, each.running, each.error) for each in scaler.outcomes] == [
        (1, 3, "4 processes were asked for, and other numbers generate; it is asked again")
    ]
    scaler.run(10, processes=4, idle=0.1)
    assert scaler.outcomes[-1].error == ""


def test_decision_beyond_newer_bounds_is_no_dead_letter() -> None:
    scaler = Autoscaler()
    scaler.run(40)
    scaler.run(10, processes=4, idle=0.1)
    assert scaler.outcomes
    scaler.step = replace(scaler.step, maximum=3)
    scaler.restart()
    scaler.run(100, processes=4, idle=0.1)
    assert scaler.log.rows(DEAD_LETTERS) == []
    assert scaler.actuator.asked[:2] == [(1, 4), (2, 3)]


def test_dry_run_decides_and_scales_nothing() -> None:
    scaler = Autoscaler(dry_run=True)
    scaler.run(60)
    assert [each.dry_run for each in scaler.decisions] == [True]
    assert (scaler.actuator.asked, scaler.outcomes) == ([], [])


def test_target_of_a_dry_run_is_not_that_of_the_run() -> None:
    scaler = Autoscaler(dry_run=True, cooldown_s=20.0)
    scaler.run(60)
    scaler.step = replace(scaler.step, config=replace(scaler.step.config, dry_run=False))
    scaler.restart()
    scaler.run(60)
    assert next(each.before for each in scaler.decisions if not each.dry_run) == 2
    assert scaler.actuator.asked


def test_dry_run_does_not_carry_out_an_earlier_decision() -> None:
    scaler = Autoscaler(errors=["forbidden"] * 9)
    scaler.run(40)
    asked = len(scaler.actuator.asked)
    scaler.step = replace(scaler.step, config=replace(scaler.step.config, dry_run=True))
    scaler.restart()
    scaler.run(60)
    assert len(scaler.actuator.asked) == asked > 0


def test_autoscaler_does_nothing_in_a_paused_run() -> None:
    scaler = Autoscaler()
    scaler.log.append(METRICS, Metric(PAUSE, 1, {"paused": 1.0}, 0), PAUSE)
    scaler.run(60)
    assert scaler.decisions == []


def test_silent_trainer_counts_as_waiting() -> None:
    scaler = Autoscaler()
    scaler.run(10, idle=0.1)
    scaler.run(300, idle=None)
    assert scaler.decisions[0].target > 2


def test_trainer_hidden_by_a_transaction_is_not_waiting() -> None:
    scaler = Autoscaler()
    scaler.run(10, idle=0.1)
    scaler.unread = frozenset({METRICS.short_name})
    scaler.run(300, idle=None)
    assert scaler.decisions == []
    assert "trainer_idle" not in scaler.log.rows(METRICS)[-1].values
    scaler.unread = frozenset()
    scaler.run(30, idle=None)
    assert scaler.decisions[0].target > 2


@pytest.mark.parametrize("gone", [{"state": "draining"}, {"state": "stopped"}, {"policy_version": None}])
def test_processes_that_do_not_generate_are_not_counted(gone: dict[str, Any]) -> None:
    scaler = Autoscaler(policy="queue")
    for _ in range(10):
        scaler.now += 5
        scaler.beat(2, running=8)
        scaler.log.append(METRICS, Metric(PLACEMENT, 1, {"waiting": 8.0}, 0), PLACEMENT)
        scaler.log.append(
            REPLICAS, _status(replica=2, process=2, incarnation=1, **{"state": "running", "running": 0, **gone})
        )
        scaler.turn()
    assert (scaler.decisions[0].running, scaler.decisions[0].reason) == (2, "1.50 requests a slot, above 1")


def test_replica_without_heartbeats_is_gone() -> None:
    scaler = Autoscaler()
    scaler.run(5, processes=3, idle=0.1)
    scaler.run(40, idle=0.1)
    scaler.run(40)
    assert scaler.decisions[0].running == 2


def test_staleness_is_of_trajectories_settled_lately() -> None:
    scaler = Autoscaler(policy="staleness")
    for _ in range(8):
        scaler.now += 5
        scaler.beat(2)
        scaler.log.append(SETTLED, replace(settled("p1.0"), staleness=3))
        scaler.turn()
    assert [(each.target, each.reason) for each in scaler.decisions] == [(1, "the mean staleness is 3.00, above 1.5")]


def test_policy_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    scaler = Autoscaler(policy="queue")
    monkeypatch.setattr(scaler.shard.fold._policy, "request", lambda seen: 1 / 0)  # type: ignore[union-attr]
    scaler.run(60)
    assert scaler.decisions == []
    assert "division by zero" in caplog.text


def test_actuator_is_told_the_machines_with_the_newest_weights() -> None:
    """Those with the fewest replicas first; a relay that is silent, or has an older version, is none of them."""
    scaler = Autoscaler()
    held = {"silent": ("1.9",), "old": ("1.1",), "two": ("1.2", "1.1"), "one": ("1.2",), "none": (), "a b;c": ("1.2",)}
    for second in range(0, 100, 5):
        for relay, (host, versions) in enumerate(held.items()):
            if host != "silent" or second == 0:
                scaler.log.append(REPLICAS, RelayStatus(relay, versions, 0, host, 1, 0), f"relay-{relay}")
        for replica, host in enumerate(("two", "two", "one", "old")):
            fields = {"replica": replica, "process": replica // 2, "incarnation": 1, "state": "running", "running": 3}
            scaler.log.append(REPLICAS, _status(**fields, host=host), f"rollout-{replica}")
        scaler.train(0.9)
        scaler.now += 5
        scaler.turn()
    assert scaler.actuator.asked
    assert scaler.actuator.machines == ["one", "two"]
