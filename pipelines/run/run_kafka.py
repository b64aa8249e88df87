"""The Kafka of a run: a local broker, which is started and restarted, or a configured cluster, which is monitored."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from infra.files import describe_free_space, is_full
from infra.kafka.admin import TopicError, admin_client, list_topics
from infra.kafka.broker import Broker, BrokerConfig, BrokerDied, BrokerStartError
from infra.kafka.broker_jars import JARS
from infra.kafka.detached_broker import last_port
from infra.kafka.readiness import (
    BrokerUnreachable,
    TransientError,
    connection_problem,
    retry_transient,
    wait_for_brokers,
)
from pipelines.config import ConfigError, KafkaConfig
from pipelines.run.restarts import Restarts
from schemas.topics import run_prefix

T = TypeVar("T")
WAIT_S = 60.0
"""How long a configured cluster may take to answer at the start."""
PROBE_EVERY_S = 10.0
MAX_RETRIES = 5
"""How often a request is repeated."""
RETRY_EVERY_S = 0.5
_LAPSE_S = 30.0
"""After a longer gap between two probes, the outage is measured from the later one: the process may have slept."""


class RunLost(RuntimeError):
    """Records or files that a run needs have been deleted: it cannot be resumed."""


class TopicsDeleted(RunLost, TopicError):
    """Topics of the run were deleted during the run."""


class BrokerDataDeleted(RunLost, BrokerStartError):
    """The data of the run's own broker was deleted."""


class BrokerDiskFull(BrokerStartError):
    """The run's own broker cannot run because its disk is full; the message says so."""


class RunKafka:
    """The cluster of `config`, or a local broker with its data in `folder`, if `config` names none or `folder` exists.

    `note` receives one-line messages.
    """

    def __init__(self, config: KafkaConfig, folder: Path, note: Callable[[str], None]) -> None:
        self.config = config
        self._folder, self._note = folder, note
        self._own: Broker | None = None
        self._restarts = Restarts()
        self._started = False
        self._answered_at = self._probed_at = -float("inf")
        self._unavailable = False
        self.topics: frozenset[str] = frozenset()
        """The run's topics, set once they are created; probes check that they still exist."""
        self._missing: frozenset[str] = frozenset()

    @property
    def starts_broker(self) -> bool:
        """Whether `start` starts a local broker."""
        given = self.config.bootstrap_servers or self.config.client_properties
        return not given or self._folder.is_dir()

    @property
    def fetches_broker(self) -> bool:
        """Whether `start` fetches the jars of a local broker first."""
        return self.starts_broker and not JARS.is_resolved()

    def start(self) -> None:
        """Return once Kafka answers; `config` then has its address. Raises BrokerStartError, BrokerUnreachable."""
        if self.starts_broker:
            self._own = Broker(BrokerConfig(self._folder, last_port(self._folder)))
            self._start_broker()
            self.config = replace(self.config, bootstrap_servers=self._own.bootstrap_servers)
        setting = self.config.address_setting
        wait_for_brokers(self.config.client(), WAIT_S, lambda _, line: self._note(line), setting=setting)
        self._started = True

    def refuse_existing(self, run: str) -> None:
        """Raise ConfigError if Kafka has topics of a run of this name: their records would be mixed with this run's."""
        client = self.config.client()

        def existing_topics() -> list[str]:
            with admin_client(client) as admin:
                return list_topics(admin, run_prefix(run))

        if retry_transient(existing_topics):
            raise ConfigError(
                f"Kafka at {client.bootstrap_servers} already has topics of a run {run!r}: choose another run.name"
            )

    def poll(self) -> None:
        """Restart the local broker if it has died; probe Kafka from time to time. Call it often.

        Raises BrokerStartError, BrokerUnreachable, TopicError.
        """
        if self._has_died():
            self._restart()
        elif time.monotonic() - self._probed_at >= min(PROBE_EVERY_S, self.config.outage_timeout_s / 4):
            self.answers()

    def answers(self) -> bool:
        """Whether Kafka answers now; it does before its start, too: nobody waits for it.

        Raises BrokerUnreachable after an outage longer than `outage_timeout_s`, TopicError if topics were deleted.
        """
        if not self._started:
            return True
        if self._has_died():
            return False
        client, now = self.config.client(), time.monotonic()
        reason = connection_problem(client.admin(), timeout_s=1.0)
        if reason is None:
            self._check_topics()
        if reason is None or now - self._probed_at > _LAPSE_S:
            self._answered_at = now
        self._probed_at = now
        where, outage = f"Kafka at {client.bootstrap_servers}", now - self._answered_at
        if outage > self.config.outage_timeout_s:
            raise BrokerUnreachable(f"{where} has not answered for {outage:.0f} s: {reason}")
        if self._unavailable != (reason is not None):
            self._unavailable = reason is not None
            self._note(f"{where} does not answer: {reason}" if self._unavailable else f"{where} answers again")
        return reason is None

    def retry(self, request: Callable[[], T]) -> T:
        """Return the result of `request`, which reads from Kafka; repeat it after each outage.

        Raises what `answers` raises, and the error of a request that keeps failing while Kafka answers.
        """
        for _ in range(MAX_RETRIES):
            try:
                return request()
            except TransientError as error:
                self._note(f"reading from Kafka again, after: {error}")
            while not self.answers():
                self.poll()
                time.sleep(RETRY_EVERY_S)
        return request()

    def _check_topics(self) -> None:
        """Raise TopicError if topics are missing in two checks in a row: a starting broker may not list all."""
        try:
            with admin_client(self.config.client()) as admin:
                missing = self.topics.difference(list_topics(admin)) if self.topics else frozenset()
        except TransientError:
            return
        if gone := sorted(missing & self._missing):
            raise TopicsDeleted(
                f"topics of this run have been deleted from Kafka at {self.config.client().bootstrap_servers}: "
                f"{', '.join(gone)}. Their records are lost, so the run cannot continue: start a new run"
            )
        self._missing = missing

    def _has_died(self) -> bool:
        return self._own is not None and not self._own.is_alive()

    def _restart(self) -> None:
        assert self._own is not None
        if not self._own.has_data():
            raise BrokerDataDeleted(
                f"the broker's data in {self._folder} has been deleted, and the run's records with it: start a new run"
            )
        self._pause_after(BrokerDied("its process is gone"), time.monotonic())
        self._own.kill()  # a dead process holds its port until it has been waited for
        self._start_broker()

    def _start_broker(self) -> None:
        """Start the local broker. A death during the start counts towards the restart limit."""
        assert self._own is not None
        began = time.monotonic()
        while True:
            try:
                return self._own.start(self._note)
            except BrokerDied as error:
                self._pause_after(error, began)

    def _pause_after(self, died: BrokerDied, since: float) -> None:
        """Pause before the next start of the broker. Raises BrokerStartError if it is not to be restarted.

        `since` is the time of the first start in a row of failed ones.
        """
        assert self._own is not None
        pause, why = self._restarts.record_death(), f"{died} (see {self._own.log_file})"
        if is_full(self._folder):
            raise BrokerDiskFull(
                f"the broker cannot run because the disk is full, {describe_free_space(self._folder)}: {why}"
            ) from died
        if pause is None:
            raise BrokerStartError(f"the broker died {self._restarts.rate()}; last error: {why}") from died
        if time.monotonic() - since > (limit := self.config.outage_timeout_s):
            raise BrokerStartError(
                f"the broker did not start within kafka.outage_timeout_s = {limit:g} s; last error: {why}"
            ) from died
        self._note(f"the broker has died ({str(died).splitlines()[0]}); restarting it")
        time.sleep(pause)

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop the local broker; kill it after `timeout_s` seconds."""
        if self._own is not None:
            self._own.stop(timeout_s)
