"""ScaleRollouts: observes the load, decides how many rollout processes there are, and carries the decisions out."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from infra.clocks import wall_ms
from infra.runners.step_metrics import phase
from operators.autoscaler.actuators import Actuator, ActuatorFailed
from operators.autoscaler.config import AutoscalingConfig
from operators.autoscaler.decide import Decision, History, ScalingLimits, decide
from operators.autoscaler.load import Load
from operators.autoscaler.machines import Machines
from operators.autoscaler.observation import Observation
from operators.autoscaler.policies import Policy, make_policy
from operators.autoscaler.prices import Prices
from operators.io.dead_letters import dead_letter
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, Restored, ShardFold
from operators.io.map_outputs import MapOutputs
from schemas.records import Metric, ScalingDecision, ScalingOutcome
from schemas.topics import DECISION, METRICS, OUTCOME, SCALING

log = logging.getLogger(__name__)

NAME = "autoscaler"
"""The name of its metric."""
DAY_MS = 24 * 3600 * 1000
_PLACE = PartitionKey(SCALING.short_name, 0)

ScalingOutput = ScalingDecision | ScalingOutcome | Metric | Output


@dataclass(frozen=True)
class ScaleRollouts:
    """`processes` is the number with which the run starts, `maximum` the upper bound of the target. A replica without
    a heartbeat for `timeout_s` seconds is gone.
    """

    config: AutoscalingConfig
    actuator: Actuator
    processes: int
    maximum: int
    timeout_s: float

    @property
    def limits(self) -> ScalingLimits:
        """The bounds of the decisions."""
        config = self.config
        return ScalingLimits(config.minimum, self.maximum, config.stable_s, config.cooldown_s, config.max_step)

    def restore(
        self,
        restored: Restored,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], int] = wall_ms,
    ) -> ScalingFold:
        """The state of a start. Raises ValueError for a policy that cannot be loaded."""
        return ScalingFold(self, restored.state, make_policy(self.config), clock, now)


class ScalingFold(ShardFold):
    """Observations are of this start alone. What is left of a cool-down when the process ends is waited for again, by
    the clock of the next one: no time of another machine is compared.
    """

    def __init__(
        self,
        step: ScaleRollouts,
        state: Mapping[str, Any],
        policy: Policy,
        clock: Callable[[], float],
        now: Callable[[], int],
    ) -> None:
        config = step.config
        self._step, self._policy, self._clock, self._now = step, policy, clock, now
        self._load, self._machines = Load(step.timeout_s, config.stable_s), Machines(step.timeout_s)
        pace = Pace(config.actuator_timeout_s, config.retry_s, config.cooldown_s, config.stable_s)
        self._execution = Execution(step.actuator, pace, now, state.get("reported", 0))
        self._prices = Prices(config.price_file, float(state.get("elapsed", 0.0)), clock)
        self._number: int = state.get("number", 0)
        target: int = state.get("target", step.processes)
        self._asked: int = state.get("asked", target)
        """The target that was decided last without dry run; the one of a dry run begins with it."""
        self._target = target if config.dry_run else self._asked
        self._changeable_at = clock() + float(state.get("cooldown", 0.0))
        self._observations: deque[Observation] = deque()
        self._observe_at = clock()

    def fold(self, polled: Polled) -> list[ScalingOutput]:
        clock, outputs = self._clock(), list[ScalingOutput]()
        with phase("observe load"):
            for received in polled.records:
                if isinstance(received.record, ScalingDecision):
                    if (reason := self._foreign_reason(received.record)) is not None:
                        if 0 < received.record.number == self._execution.reported:
                            continue  # read again: it was within the bounds of before
                        outputs.append(dead_letter(received, "scale rollouts", reason, self._now()))
                    else:
                        self._execution.take(received.record, received.offset, clock)
                else:
                    self._load.record(received.record, clock)
                    self._machines.record(received.record, clock)
            if METRICS.short_name not in polled.unread:
                self._load.record_read(clock)
        with phase("decide target"):
            if polled.caught_up and not polled.last and clock >= self._observe_at:
                self._observe_at = clock + self._step.config.observe_s
                outputs += self._decide(self._observe(clock))
        with phase("carry out decisions"):
            if polled.caught_up and not polled.last and not self._step.config.dry_run:
                running = self._observations[-1].running if self._observations else 0
                outputs += self._execution.advance(running, clock, self._machines.nearest(clock))
        return outputs

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        left = max(0, math.ceil(self._changeable_at - self._clock()))
        state = {"number": self._number, "target": self._target, "asked": self._asked}
        state |= {"cooldown": left, "elapsed": self._prices.elapsed, "reported": self._execution.reported}
        needed = self._execution.needed_offset
        low_water = positions if needed is None else {**positions, _PLACE: needed}
        return Checkpoint(low_water, state=state)

    def close(self) -> None:
        self._execution.close()

    def _foreign_reason(self, decision: ScalingDecision) -> str | None:
        """Why `decision` is not one of the autoscaler's; None if it is."""
        limits = self._step.limits
        if decision.number > self._number:
            return f"decision {decision.number} was not made by the autoscaler, whose last is {self._number}"
        if not limits.minimum <= decision.target <= limits.maximum:
            return f"target {decision.target} is not between {limits.minimum} and {limits.maximum}"
        return None

    def _observe(self, clock: float) -> Observation:
        price = self._prices.read()
        seen = self._load.observe(clock, self._now() % DAY_MS // 1000, price)
        self._observations.append(seen)
        while len(self._observations) > 1 and self._observations[1].at <= clock - self._step.config.stable_s:
            self._observations.popleft()
        return seen

    def _decide(self, seen: Observation) -> list[ScalingOutput]:
        history = History(tuple(self._observations), self._target, self._changeable_at)
        decision = self._decision(history)
        if decision.target == self._target:
            return [self._metric(seen)]
        self._number += 1
        record = ScalingDecision(
            self._number,
            self._step.config.policy,
            seen.running,
            self._target,
            decision.target,
            decision.reason,
            self._step.config.dry_run,
            self._now(),
        )
        log.info(
            "decision %d: %d -> %d rollout processes: %s", self._number, self._target, record.target, record.reason
        )
        self._target, self._changeable_at = decision.target, seen.at + self._step.config.cooldown_s
        if not self._step.config.dry_run:
            self._asked = decision.target
        return [record, self._metric(seen)]

    def _decision(self, history: History) -> Decision:
        try:
            return decide(history, self._policy, self._step.limits)
        except Exception as error:  # noqa: BLE001 - a user's policy must not end the run
            log.warning("the policy %s failed: %r", self._step.config.policy, error)
            return Decision(history.target, f"the policy failed: {error!r}")

    def _metric(self, seen: Observation) -> Metric:
        known = {
            "trainer_idle": seen.trainer_idle,
            "rollout_idle": seen.rollout_idle,
            "staleness": seen.staleness,
            "requests_per_slot": seen.requests_per_slot,
            "price": seen.price,
        }
        values = {name: value for name, value in known.items() if value is not None}
        return Metric(NAME, self._number, {"running": seen.running, "target": self._target, **values}, self._now())


@dataclass(frozen=True)
class Pace:
    """In seconds: an actuator may take `timeout_s`. It is asked again `retry_s` after an error, `start_s` after a
    request without effect, and once the number of processes has differed for `drift_s` from that of a decision that was
    carried out."""

    timeout_s: float
    retry_s: float
    start_s: float
    drift_s: float


class Execution:
    """Carries out the newest decision by `actuator`, in a thread of its own, and keeps it: an actuator whose number was
    changed by others (a manifest that was applied again) is asked again.

    A decision is requested only once it has been read back from its topic, so an actuator gets committed ones, and a
    restart reads the newest decision again. A later decision replaces an earlier one. `reported` is the number of the
    last decision with an outcome.
    """

    def __init__(self, actuator: Actuator, pace: Pace, now: Callable[[], int], reported: int = 0) -> None:
        self._actuator, self._pace, self._now, self.reported = actuator, pace, now, reported
        self._thread = ThreadPoolExecutor(1, "actuator")
        self._decision: ScalingDecision | None = None
        self.needed_offset: int | None = None
        """The offset of the newest decision, from which a restart must read; None without one."""
        self._since = self._differs = self._due = 0.0
        self._asking: tuple[int, Future[None]] | None = None
        self._asked = False
        self._error = ""

    def take(self, decision: ScalingDecision, offset: int, clock: float) -> None:
        """Carry out `decision`, read at `offset` of its topic, from `clock` (monotonic seconds) on."""
        if decision.dry_run or (self._decision is not None and decision.number <= self._decision.number):
            return
        self._decision, self.needed_offset = decision, offset
        self._since = self._differs = self._due = clock
        self._asked, self._error = decision.number <= self.reported, ""

    def advance(self, running: int, clock: float, machines: Sequence[str] = ()) -> list[ScalingOutcome]:
        """Ask the actuator if that is due. Returns the outcome of the decision, once; and an error when it is new.

        `running` processes generate; new ones start soonest on the first of `machines`.
        """
        decision = self._decision
        if decision is None:
            return []
        failed = self._take_answer(decision)
        if failed:
            self._due = clock + self._pace.retry_s
        reached = decision.number <= self.reported
        if running == decision.target:
            self._differs = clock
            if self._asked and not reached:
                self.reported = decision.number
                return [self._outcome(decision, running, "", clock - self._since)]
        elif self._asked and self._lasts(clock, reached):
            self._asked, self._due = False, clock
            if not reached:
                failed = f"{decision.target} processes were asked for, and other numbers generate; it is asked again"
        if self._asking is None and not self._asked and clock >= self._due:
            self._due = clock
            request = self._thread.submit(self._actuator.apply, decision, machines, self._pace.timeout_s)
            self._asking = decision.number, request
        if failed in ("", self._error):
            return []
        self._error = failed
        return [self._outcome(decision, running, failed, clock - self._since)]

    def close(self) -> None:
        """Ask for nothing more. A request under way is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _lasts(self, clock: float, reached: bool) -> bool:
        """Whether a request that was accepted has had no effect for too long, or has lost it."""
        return clock >= max(self._differs, self._due) + (self._pace.drift_s if reached else self._pace.start_s)

    def _take_answer(self, decision: ScalingDecision) -> str:
        """The error of the request that has ended; "" without one."""
        if self._asking is None or not self._asking[1].done():
            return ""
        (number, request), self._asking = self._asking, None
        error = request.exception()
        if number != decision.number:  # of an earlier decision; the present one is asked for next
            return ""
        if error is None:
            self._asked = True
            return ""
        if not isinstance(error, ActuatorFailed):
            raise error
        return str(error)

    def _outcome(self, decision: ScalingDecision, running: int, error: str, seconds: float) -> ScalingOutcome:
        return ScalingOutcome(decision.number, self._actuator.name, running, error, round(seconds, 3), self._now())


class ReportDecisions(MapOutputs):
    """Writes decisions and outcomes to `scaling`, and what was observed to `metrics`."""

    writes = (SCALING, METRICS)

    def __init__(self) -> None:
        super().__init__(report_decisions)


def report_decisions(outputs: Sequence[Any]) -> list[Any]:
    """The records of the decisions, outcomes and metrics in `outputs`; all other outputs stay, in their place."""
    return [_reported(output) for output in outputs]


def _reported(output: Any) -> Any:
    match output:
        case ScalingDecision():
            return Output(SCALING, DECISION, output)
        case ScalingOutcome():
            return Output(SCALING, OUTCOME, output)
        case Metric():
            return Output(METRICS, NAME, output)
    return output
