"""What surrounds a role that is submitted separately: Kafka and the store are prepared, and a guard watches its errors.

No supervisor watches the run, so the role that counts the failures stops itself; and prompts, when all questions are
drawn and nothing is left to train.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from infra.clocks import wall_ms
from infra.kafka.admin import admin_client, cluster_id
from infra.kafka.observer import Observer
from infra.kafka.ranges import partition_ranges
from infra.kafka.readiness import ClientError, retry_transient, wait_for_brokers
from infra.kafka.topic_reader import StoredRecord, follow_topic, last_records
from infra.machine import visible_gpus
from infra.runners.stopping import STOPPING
from infra.store.errors import StoreError
from infra.store.ownership import claim_store
from operators.relay.config import AUTO
from pipelines.config import Config, ConfigDraft, ConfigError, ConfigProblems
from pipelines.inspect.log.chunks import rows_of
from pipelines.inspect.run_folders import NoSuchRun, read_any
from pipelines.inspect.run_state.events import RoleState
from pipelines.inspect.run_state.local_run import submitted_roles
from pipelines.inspect.run_state.refused import refused
from pipelines.inspect.run_state.state import fold_all, new_run
from pipelines.present.view.watch import Watch
from pipelines.roles import ALL_SHARDS, DATA_PLANE, SCALED, WITH_ENGINE, WITH_STORE, RoleProcess
from pipelines.run.preflight import absent_gpus, shared_gpus
from pipelines.run.resharding import reshard_role
from pipelines.run.run_guard import COLUMNS, RunFailing, RunGuard
from pipelines.run.run_kafka import WAIT_S
from pipelines.run.submission.detached import roles_here
from pipelines.run.submission.role_checks import role_problems
from pipelines.run.topics import check_kafka, make_topics
from pipelines.run.upgrade import refuse_new_role
from pipelines.shards import store_folder
from schemas.metric_labels import EXHAUSTED, SHARD
from schemas.records import Metric
from schemas.topics import EXPERIENCES, INBOX, METRICS, TRAJECTORIES


def prepare(draft: ConfigDraft, process: RoleProcess, note: Callable[[str], None]) -> None:
    """Wait for Kafka, create the run's missing topics, and change the number of shards of a role whose first or only
    process it is; `note` receives one-line messages.

    Raises ConfigError if `draft` is wrong or incomplete for a role, or its GPU is absent or another role's,
    BrokerUnreachable, TopicError, UnsuitableKafka.
    """
    config = draft.config
    problems = [problem for role in process.roles for problem in role_problems(config, role)]
    first = process.roles[0]  # one with an engine is alone
    if first.pipeline in WITH_ENGINE and not config.emulated:
        gpus = visible_gpus()
        problems += absent_gpus(config, first, gpus)
        if "CUDA_VISIBLE_DEVICES" not in os.environ:  # else the other role may have other GPUs by it
            others = [role for role, pid in roles_here(config) if pid != os.getpid()]
            problems += shared_gpus(config, first, others, gpus)
    own = replace(config, kafka=config.kafka.for_role(first.pipeline))
    try:
        client = own.kafka.client()
    except ValueError as error:
        problems.append(str(error))
    except OSError as error:
        if not draft.problems_and(problems):
            raise  # a file that may come back, unlike a wrong setting
        problems.append(str(error))
    if all_of_them := draft.problems_and(dict.fromkeys(problems)):
        raise ConfigProblems(all_of_them)
    wait_for_brokers(client, WAIT_S, lambda _, line: note(line), setting=own.kafka.address_setting)
    check_kafka(own)  # before any topic is created
    make_topics(own, note)
    refuse_new_role(client, config.run.name, first.pipeline)
    for role in process.roles:
        if role.pipeline in SCALED and role.index in (0, ALL_SHARDS):  # the other shards cannot start before
            retry_transient(partial(reshard_role, config, role.pipeline, note))


@contextmanager
def claimed_store(config: Config, process: RoleProcess) -> Iterator[None]:
    """Hold this machine's weight store for the run while `process` runs, if its role has one.

    Roles that are submitted one by one find the store by the run's name. Raises ConfigError if a run of that name in
    another Kafka cluster uses it.
    """
    role = process.roles[0]  # one with a store is alone
    if role.pipeline not in WITH_STORE or config.relay.store != AUTO:
        yield
        return
    with admin_client(config.kafka.for_role(role.pipeline).client()) as admin:
        cluster = retry_transient(lambda: cluster_id(admin))
    try:
        lock = claim_store(store_folder(config), cluster, config.run_folder)
    except StoreError as error:
        raise ConfigError(str(error)) from error
    try:
        yield
    finally:
        lock.release()


SERIES = {"score": "score", "prompts": "prompts"}
"""The roles that count failures, each with its metric: errors of trajectories, refused rows."""
HOLDING = ("placement", "score", "experience")
"""The roles with trajectories of training between `prompts` and `batches`."""
RETRY_S = 5.0
OBSERVE_S = 0.5
EARLIER_METRICS = 500
"""Of the newest metrics before the start, the last of the series has the counts of earlier starts. It may be older."""

log = logging.getLogger(__name__)


@contextmanager
def guarded(config: Config, file: Path, process: RoleProcess) -> Iterator[None]:
    """Stop `process`, which runs in this context, when the metrics of its roles show a run that cannot learn.

    `file` is that of `config`, for messages.
    Raises RunFailing at the end of the context if it was stopped for that reason.
    """
    roles = [role.pipeline for role in process.roles if role.pipeline in SERIES]
    guards = [_Guard(replace(config, kafka=config.kafka.for_role(role)), file, SERIES[role]) for role in roles]
    try:
        yield
    finally:
        for guard in guards:
            guard.ended.set()
            guard.thread.join()
    for guard in guards:
        if guard.failure is not None:
            raise guard.failure


@dataclass
class _Guard:
    config: Config
    file: Path
    series: str
    failure: RunFailing | None = None

    def __post_init__(self) -> None:
        self.ended = threading.Event()
        self._client, self._topic = self.config.kafka.client(), METRICS.name(self.config.run.name)
        # Before the role starts: its first metric must not be older than the position.
        self._ends = {number: held.end for number, held in partition_ranges(self._client, self._topic).items()}
        self._started_at = wall_ms()
        self.thread = threading.Thread(target=self._watch, name="run guard", daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        while self.failure is None and not self.ended.is_set():
            try:
                self._follow()
            except ClientError as error:
                log.warning("the errors of the run are not watched for %g s: %s", RETRY_S, error)
                self.ended.wait(RETRY_S)
            except RunFailing as failure:
                self.failure = failure
                STOPPING.set()

    def _follow(self) -> None:
        run, client = self.config.run.name, self._client
        guard = RunGuard(self.config, self.file, self._started_at)
        # The counts of earlier starts: errors before this one do not count.
        newest = last_records(client, self._topic, EARLIER_METRICS)
        before = self._metrics(each for each in newest if each.offset < self._ends[each.partition])
        state = fold_all(new_run(run, None, self._started_at), before)
        guard.check(state, lambda _: (), earlier=True)
        shards = {metric.values.get(SHARD) for metric in before}
        may_be_older = sum(self._ends.values()) > EARLIER_METRICS
        for records in follow_topic(client, self._topic, self._ends):
            metrics = self._metrics(records)
            state, seen = fold_all(state, metrics), {metric.values.get(SHARD) for metric in metrics}
            is_first, shards = may_be_older and not seen <= shards, shards | seen  # its counts may be of earlier starts
            guard.check(state, self._experiences, earlier=is_first)
            if state.prompts.get(EXHAUSTED) and metrics:  # written since the start, whatever the clock of its machine
                self._await_end(metrics[-1])
            if self.ended.is_set():
                return

    def _await_end(self, exhausted: Metric) -> None:
        """Observe the whole run once `exhausted` says that all questions are drawn, until the role ends.

        Raises RunFailing if nothing is left to train then, and the run is not at its goal.
        """
        run, guard = self.config.run, RunGuard(self.config, self.file, self._started_at)
        goal, folder = self.config.trainer.optimizer_steps, self.config.run_folder
        state = fold_all(new_run(run.name, goal, self._started_at, folder=folder), [exhausted])
        with Observer(self._client, run.name, refuse=refused) as observer:
            watch = Watch(state, source=observer)
            while not self.ended.wait(OBSERVE_S):
                state = watch.tick(self._roles_before_training())
                measured = (
                    state.undispatched is not None and {INBOX.short_name, TRAJECTORIES.short_name} <= state.lag.keys()
                )
                if observer.caught_up() and measured:
                    guard.check_end(state, self._experiences)

    def _roles_before_training(self) -> dict[str, RoleState]:
        """The roles of this machine that may hold what no lag shows; of replicas, heartbeats and `inbox` show it."""
        with suppress(NoSuchRun):
            found = submitted_roles(read_any(self.config.run_folder))
            return {
                name: role for name, role in found.items() if name.partition("-")[0] in HOLDING or name == DATA_PLANE
            }
        return {}

    def _experiences(self, since: int) -> Iterable[Mapping[str, Any]]:
        return rows_of(self._client, self.config.run.name, EXPERIENCES, COLUMNS, since)

    def _metrics(self, records: Iterable[StoredRecord]) -> list[Metric]:
        written = ((row, record.transactional) for record in records for row in record.rows if isinstance(row, Metric))
        return [row for row, by_role in written if row.name == self.series and refused(row, by_role) is None]
