"""The rollout processes of `laminar run` follow the autoscaler's decisions, which this reads from the topic `scaling`.

A decision names the whole number of processes: the run has rollout-0 up to that number. So reading a decision twice, or
only the newest of several, has the same effect.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from infra.kafka.ranges import partition_ranges
from infra.kafka.readiness import ClientError
from infra.kafka.topic_reader import StoredRecord, follow_topic, read_topic
from operators.autoscaler.config import AutoscalingConfig
from pipelines.config import Config
from pipelines.roles import RoleProcess, is_of_pipeline, processes_of_pipeline
from pipelines.run.fleet import Fleet
from schemas.records import ScalingDecision
from schemas.topics import SCALING

log = logging.getLogger(__name__)

ROLLOUT = "rollout"
RETRY_S = 5.0


def newest_target(records: Iterable[StoredRecord], present: int, bounds: range) -> int:
    """The target of the last decision in `records` that is to be carried out; `present` without one.

    The autoscaler writes in transactions, and targets within `bounds`: other decisions are of another program.
    """
    for record in records:
        for row in record.rows if record.transactional else ():
            if isinstance(row, ScalingDecision) and not row.dry_run and row.target in bounds:
                present = row.target
    return present


class FollowedTarget:
    """The number of rollout processes by the newest decision, which a thread follows; that of the configuration
    without one.

    Raises UnknownTopic, and the errors of a Kafka that does not respond.
    """

    def __init__(self, config: Config, scaling: AutoscalingConfig) -> None:
        self.devices = scaling.devices
        """What rollouts and trainer share; 0: nothing."""
        self._bounds = range(scaling.minimum, scaling.most(config.rollout.replicas, config.inboxes) + 1)
        self._client, self._topic = config.kafka.client(), SCALING.name(config.run.name)
        self._positions = {number: held.end for number, held in partition_ranges(self._client, self._topic).items()}
        self.target = newest_target(read_topic(self._client, self._topic), config.rollout.processes, self._bounds)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scaling decisions", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join(RETRY_S)

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._follow()
            except ClientError as error:
                log.debug("scaling decisions are not read for %g s: %s", RETRY_S, error)
                self._ended.wait(RETRY_S)

    def _follow(self) -> None:
        for records in follow_topic(self._client, self._topic, self._positions):
            for record in records:
                self._positions[record.partition] = record.offset + 1
            self.target = newest_target(records, self.target, self._bounds)
            if self._ended.is_set():
                return


def with_rollouts(processes: Iterable[RoleProcess], count: int) -> list[RoleProcess]:
    """`processes` with the first `count` rollout processes in the place of theirs."""
    others = (process for process in processes if not is_of_pipeline(process.name, ROLLOUT))
    return [*others, *processes_of_pipeline(ROLLOUT, count)]


def follow_target(fleet: Fleet, target: int, note: Callable[[str], None], notice_s: float) -> None:
    """Have rollout processes 0 to `target` - 1 in `fleet`: start those that are missing; the others drain and end.

    A process that ends has `notice_s` seconds to hand its work over (`rollout.termination_notice_s`); one that is
    still ending is started again after its end, so call this often. `note` receives one-line messages.
    """
    members, wanted = fleet.members, processes_of_pipeline(ROLLOUT, target)
    for process in wanted:
        member = members.get(process.name)
        if member is None or (not member.wanted and member.pid is None):
            fleet.add(process)
            note(f"{process.name} starts, by the autoscaler's target of {target}")
    names = {process.name for process in wanted}
    running = (name for name, each in members.items() if each.wanted and is_of_pipeline(name, ROLLOUT))
    leaving = [name for name in running if name not in names]
    does = "hands its work over" if notice_s else "publishes its work"
    for name in leaving:
        note(f"{name} {does} and ends, by the autoscaler's target of {target}")
    fleet.stop(leaving)
