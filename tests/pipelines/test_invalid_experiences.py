"""Invalid experiences of other writers: the experience pipeline writes them to dead letters."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kafka import KafkaConsumer, KafkaProducer, TopicPartition

from infra.kafka.broker import Broker
from infra.runners.run import run_pipeline
from infra.runners.stopping import STOPPING
from operators.io.shards import close_shards
from pipelines.config import Config, KafkaConfig, RunConfig, parse_config
from pipelines.experience import build
from pipelines.run.topics import make_topics
from schemas.arrow import arrow_schema
from schemas.codec import decode, encode
from schemas.columns import flags, floats, token_ids
from schemas.records import Experience, PolicyVersion, Prompt, Response, Sampling, Trajectory, VersionSpan
from schemas.topics import BATCHES, DEAD_LETTERS, EXPERIENCES, SETTLED, Topic

VERSION = PolicyVersion(1, 0)


@pytest.fixture
def config(broker: Broker, run_id: str, tmp_path: Path) -> Iterator[Config]:
    (tmp_path / "config.json").write_text('{"vocab_size": 6}')
    made = replace(
        parse_config({"experience": {"global_batch": 2}, "model": {"path": str(tmp_path)}}, "a test"),
        run=RunConfig(run_id),
        kafka=KafkaConfig(broker.bootstrap_servers),
    )
    make_topics(made)
    yield made
    close_shards()


def test_experience_writes_dead_letters_for_invalid_values(config: Config) -> None:
    nan = float("nan")
    patched = encode(experience(0, 0))
    write(
        config,
        (with_reward(patched[0], nan), patched[1]),
        encode(experience(1, 0, logprobs=(-0.5, nan))),
        encode(experience(1, 1, logprobs=(-0.5, float("-inf")))),
        encode(experience(1, 2)),
        encode(experience(1, 3)),
        encode(experience(2, 0, token=6)),
        (with_reward(patched[0], float("-inf")), patched[1]),
    )
    running = threading.Thread(target=run_pipeline, args=(partial(build, config=config), "embedded", (), close_shards))
    running.start()
    try:
        (part,) = wait_for(config, BATCHES, 1)
    finally:
        STOPPING.set()
        running.join(20)
    assert part.trajectory_ids == ("p1.2", "p1.3")
    letters = {letter.offset: (letter.step, letter.reason) for letter in wait_for(config, DEAD_LETTERS, 5)}
    assert letters == {
        0: ("read experiences", "reward: a number is not finite"),
        1: ("make batches", "p1.0: a behaviour logprob is not finite"),
        2: ("make batches", "p1.1: a behaviour logprob is not finite"),
        5: ("make batches", "p2.0: token 6 is not in the model's vocabulary"),
        6: ("read experiences", "reward: a number is not finite"),
    }
    outcomes = {record.trajectory_id: record.outcome for record in wait_for(config, SETTLED, 5)}
    failed = dict.fromkeys(("p1.0", "p1.1", "p2.0"), "failed")
    assert outcomes == failed | {"p1.2": "batched", "p1.3": "batched"}


def experience(number: int, member: int, logprobs: tuple[float, ...] = (-0.5, -0.5), token: int = 5) -> Experience:
    sampling = Sampling(1.0, 1.0, 0, 8, (), 0)
    prompt = Prompt(number, "train", "sums", "1 + 1", token_ids([1, 2]), "{}", 4, sampling)
    response = Response(token_ids([token] * len(logprobs)), floats(logprobs), flags([True] * len(logprobs)))
    spans = (VersionSpan(VERSION, len(logprobs)),)
    made = Trajectory(prompt, member, 1, 1, 0, 1, response, "2", spans, VERSION, "stop", None, 0, None, 0)
    return Experience(made, 1.0, (), None, 0)


def with_reward(value: bytes, reward: float) -> bytes:
    """An encoded experience with another reward, as a writer without validation would send it."""
    schema = arrow_schema(Experience)
    batch = pa.ipc.read_record_batch(pa.py_buffer(value), schema)
    place = schema.get_field_index("reward")
    return batch.set_column(place, schema.field(place), pa.array([reward])).serialize().to_pybytes()


def write(config: Config, *records: tuple[bytes, Any]) -> None:
    producer = KafkaProducer(**config.kafka.client().producer())
    for value, headers in records:
        producer.send(EXPERIENCES.name(config.run.name), value, key=b"p0", headers=list(headers), partition=0)
    producer.flush()
    producer.close()


def wait_for(config: Config, topic: Topic, count: int) -> list[Any]:
    """The first `count` committed records of `topic`, or more."""
    consumer = KafkaConsumer(**config.kafka.client().consumer(group_id=None, isolation_level="read_committed"))
    partition = TopicPartition(topic.name(config.run.name), 0)
    consumer.assign([partition])
    consumer.seek_to_beginning(partition)
    rows: list[Any] = []
    while len(rows) < count:
        for records in consumer.poll(timeout_ms=100).values():
            rows += [row for record in records for row in decode(record.value, record.headers)]
    consumer.close()
    return rows
