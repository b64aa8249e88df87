"""The Kafka of a run: a broker of its own, started and kept alive, or a given one, waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from infra.files import describe_free_space, is_full
from infra.kafka.admin import TopicError, admin_client, list_topics
from infra.kafka.broker import Broker, BrokerConfig, BrokerDied, BrokerStartError
from infra.kafka.detached_broker import last_port
from infra.kafka.readiness import BrokerUnreachable, Unsettled, retried, wait_for_brokers, why_unreachable
from pipelines.config import ConfigError, KafkaConfig
from pipelines.run.restarts import Restarts
from schemas.topics import run_prefix

WAIT_S = 60.0
"""How long a given Kafka may take to answer at first."""
ASK_EVERY_S = 10.0
_LAPSE_S = 30.0


class RunKafka:
    """What `config` names, or a broker with its data in `folder`: it has one where it had one before.

    `note` takes one-line news.
    """

    def __init__(self, config: KafkaConfig, folder: Path, note: Callable[[str], None]) -> None:
        self.config = config
        self._folder, self._note = folder, note
        self._own: Broker | None = None
        self._restarts = Restarts()
        self._silent_since = self._asked_at = -float("inf")
        self._silent = False
        self.topics: frozenset[str] = frozenset()
        """The run's topics, once they are made: they are looked for now and then."""
        self._missing: frozenset[str] = frozenset()

    def start(self) -> None:
        """Return once Kafka answers; `config` then says where. Raises BrokerStartError, BrokerUnreachable."""
        given = self.config.bootstrap_servers or self.config.client_properties
        if not given or self._folder.is_dir():
            self._own = Broker(BrokerConfig(self._folder, last_port(self._folder)))
            self._bring_up()
            self.config = replace(self.config, bootstrap_servers=self._own.bootstrap_servers)
        wait_for_brokers(self.config.client(), WAIT_S, lambda _, line: self._note(line))

    def refuse_known(self, run: str) -> None:
        """Raise ConfigError if Kafka holds a run of this name: its records would be taken for this one's."""
        client = self.config.client()

        def held() -> list[str]:
            with admin_client(client) as admin:
                return list_topics(admin, run_prefix(run))

        if retried(held):
            raise ConfigError(
                f"Kafka at {client.bootstrap_servers} holds a run {run!r} already: choose another run.name"
            )

    def tend(self) -> None:
        """Start the run's own broker again if it has died; ask now and then whether Kafka answers. Call it often.

        Raises BrokerStartError, BrokerUnreachable, TopicError.
        """
        if self._has_died():
            self._restart()
        elif time.monotonic() - self._asked_at >= min(ASK_EVERY_S, self.config.outage_timeout_s / 4):
            self.answers()

    def answers(self) -> bool:
        """Whether Kafka answers now.

        Raises BrokerUnreachable once it has not for longer than a run is to wait, TopicError where topics are gone.
        """
        if self._has_died():
            return False
        client, now = self.config.client(), time.monotonic()
        reason = why_unreachable(client.admin(), timeout_s=1.0)
        if reason is None:
            self._look_for_topics()
        if reason is None or now - self._asked_at > _LAPSE_S:
            self._silent_since = now
        self._asked_at = now
        where, silence = f"Kafka at {client.bootstrap_servers}", now - self._silent_since
        if silence > self.config.outage_timeout_s:
            raise BrokerUnreachable(f"{where} has not answered for {silence:.0f} s: {reason}")
        if self._silent != (reason is not None):
            self._silent = reason is not None
            self._note(f"{where} does not answer: {reason}" if self._silent else f"{where} answers again")
        return reason is None

    def _look_for_topics(self) -> None:
        """Raise TopicError where topics are missing, in two looks in a row: a broker that starts may not know all."""
        try:
            with admin_client(self.config.client()) as admin:
                missing = self.topics.difference(list_topics(admin)) if self.topics else frozenset()
        except Unsettled:
            return
        if gone := sorted(missing & self._missing):
            raise TopicError(
                f"topics of this run have been deleted from Kafka at {self.config.client().bootstrap_servers}: "
                f"{', '.join(gone)}. Their records are gone with them, so the run cannot go on: start another"
            )
        self._missing = missing

    def _has_died(self) -> bool:
        return self._own is not None and not self._own.is_alive()

    def _restart(self) -> None:
        assert self._own is not None
        if not self._own.has_data():
            raise BrokerStartError(
                f"the broker's data in {self._folder} have been deleted, and the run's records with them: "
                "start another run"
            )
        self._pause_after(BrokerDied("its process is gone"), time.monotonic())
        self._own.kill()  # it may be dead and yet hold its port: it is gone once it has been waited for
        self._bring_up()

    def _bring_up(self) -> None:
        """Start the run's own broker. One that dies as it starts counts as one that dies later."""
        assert self._own is not None
        began = time.monotonic()
        while True:
            try:
                return self._own.start(self._note)
            except BrokerDied as error:
                self._pause_after(error, began)

    def _pause_after(self, died: BrokerDied, since: float) -> None:
        """Wait before another start, the broker having `died`. Raises BrokerStartError where there is to be none.

        `since` is when the first of the starts in a row began.
        """
        assert self._own is not None
        pause, why = self._restarts.count(), f"{died} (see {self._own.log_file})"
        if is_full(self._folder):
            raise BrokerStartError(
                f"the broker cannot go on: its disk is full, {describe_free_space(self._folder)}: {why}"
            ) from died
        if pause is None:
            raise BrokerStartError(f"the broker died {self._restarts.rate()}, the last time: {why}") from died
        if time.monotonic() - since > (patience := self.config.outage_timeout_s):
            raise BrokerStartError(
                f"the broker has not come up within kafka.outage_timeout_s = {patience:g} s, the last time: {why}"
            ) from died
        self._note(f"the broker has died ({str(died).splitlines()[0]}); starting it again")
        time.sleep(pause)

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop the run's own broker, by force after `timeout_s` seconds."""
        if self._own is not None:
            self._own.stop(timeout_s)
