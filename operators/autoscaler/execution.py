"""Carries out decisions that are in the log: asks the actuator, and waits until as many processes generate.

A decision is asked for only once it has been read back from its topic, so what an actuator gets was committed, and a
restart reads a decision again that has no outcome. A later decision replaces an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from operators.autoscaler.actuators import Actuator, ActuatorFailed
from schemas.records import ScalingDecision, ScalingOutcome


class Execution:
    """Carries out the newest decision by `actuator`, in a thread of its own."""

    def __init__(self, actuator: Actuator, timeout_s: float, retry_s: float, now: Callable[[], int]) -> None:
        self._actuator, self._timeout_s, self._retry_s, self._now = actuator, timeout_s, retry_s, now
        self._thread = ThreadPoolExecutor(1, "actuator")
        self._decision: ScalingDecision | None = None
        self._offset: int | None = None
        self._since = self._due = 0.0
        self._asking: tuple[int, Future[None]] | None = None
        self._asked = False
        self._error = ""

    @property
    def needed_offset(self) -> int | None:
        """The offset of the decision without an outcome, from which a restart must read; None without one."""
        return self._offset

    def take(self, decision: ScalingDecision, offset: int, clock: float) -> None:
        """Carry out `decision`, read at `offset` of its topic, from `clock` (monotonic seconds) on."""
        if decision.dry_run or (self._decision is not None and decision.number <= self._decision.number):
            return
        self._decision, self._offset = decision, offset
        self._since = self._due = clock
        self._asked, self._error = False, ""

    def advance(self, running: int, clock: float) -> list[ScalingOutcome]:
        """Ask the actuator if that is due. Returns the outcome of the decision, once; and an error when it is new.

        `running` processes generate.
        """
        decision = self._decision
        if decision is None or self._offset is None:
            return []
        failed = self._take_answer(decision)
        if failed:
            self._due = clock + self._retry_s
        if self._asked and running == decision.target:
            self._offset = None
            return [self._outcome(decision, running, "", clock - self._since)]
        if self._asking is None and not self._asked and clock >= self._due:
            request = self._thread.submit(self._actuator.apply, decision, self._timeout_s)
            self._asking = decision.number, request
        if failed in ("", self._error):
            return []
        self._error = failed
        return [self._outcome(decision, running, failed, clock - self._since)]

    def close(self) -> None:
        """Ask for nothing more. A request under way is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)

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
