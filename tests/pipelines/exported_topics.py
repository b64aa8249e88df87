"""Writes a run's topics as pipelines do, for tests of exports."""

from __future__ import annotations

from collections.abc import Callable

from kafka import KafkaProducer
from markers import wait_for_markers

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from schemas import records as r
from schemas.codec import encode
from schemas.columns import flags, floats, token_ids
from schemas.records import Metric
from schemas.topics import EXPERIENCES, METRICS, RESTORE, Topic

Laminar = Callable[..., tuple[int, str, str]]


def experience(number: int, member: int, reward: float) -> r.Experience:
    version = r.PolicyVersion(1, number)
    prompt = r.Prompt(number, "train", "sums", "1 + 1", token_ids([1, 2]), "{}", 2, r.Sampling(1.0, 1.0, 0, 8, (), 0))
    response = r.Response(token_ids([5, 6]), floats([-0.5, -0.5]), flags([True, True]))
    spans = (r.VersionSpan(version, 2),)
    trajectory = r.Trajectory(prompt, member, 1, 1, 0, 1, response, "2", spans, version, "stop", None, 0, None, 0)
    return r.Experience(trajectory, reward, (), None, 0)


class Topics:
    """A run's experiences and metrics, written in transactions."""

    def __init__(self, broker: Broker, run: str) -> None:
        self.run, self.client = run, ClientProperties.at(broker.bootstrap_servers)
        with admin_client(self.client) as admin:
            create_topics(admin, [TopicSpec(EXPERIENCES.name(run), 2), TopicSpec(METRICS.name(run), 1)])
            create_topics(admin, [TopicSpec(RESTORE.name(run), 1)])
        self._producer = KafkaProducer(**self.client.producer(transactional_id=f"{run}-feed"))
        self._producer.init_transactions()

    def write(self, numbers: range, *, commit: bool = True) -> None:
        """One record per group of two, on the two partitions alternately."""
        self._producer.begin_transaction()
        for number in numbers:
            value, headers = encode(experience(number, 0, 1.0), experience(number, 1, 0.0))
            self._send(value, headers, number % 2)
        self._end(EXPERIENCES, commit)

    def write_garbage(self) -> None:
        """Write a value without schema, an unknown version, a record of another topic, and a truncated value."""
        value, headers = encode(experience(0, 0, 1.0))
        other, other_headers = encode(Metric("a", 1, {}, 0))
        self._producer.begin_transaction()
        self._send(b"\xff", (), 0)
        self._send(value, (("laminar-schema", b"Experience/99"),), 0)
        self._send(other, other_headers, 0)
        self._send(value[:50], headers, 0)
        self._end(EXPERIENCES)

    def write_metrics(self, steps: range) -> None:
        self._producer.begin_transaction()
        for step in steps:
            value, headers = encode(Metric("trainer", step, {"loss": step / 2}, step))
            self._producer.send(METRICS.name(self.run), value, b"k", list(headers), 0)
        self._end(METRICS)

    def _end(self, topic: Topic, commit: bool = True) -> None:
        (self._producer.commit_transaction if commit else self._producer.abort_transaction)()
        wait_for_markers(self.client, topic.name(self.run))

    def close(self) -> None:
        self._producer.close()

    def _send(self, value: bytes, headers: object, partition: int) -> None:
        self._producer.send(EXPERIENCES.name(self.run), value, b"p", list(headers), partition)  # type: ignore[call-overload]
