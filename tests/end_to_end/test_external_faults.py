"""Two runs on one broker that stops for a while; one of them gets invalid data at every input."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer
from laminar_runs import LaminarRun, StartRun
from small_runs import COMPACT, EMULATED

from infra.kafka.broker import Broker, BrokerConfig, start_broker
from infra.kafka.properties import ClientProperties
from infra.kafka.topic_reader import read_topic
from pipelines.roles import LIGHT
from schemas.codec import encode
from schemas.records import CommitNote, DeadLetter, Experience, Metric
from schemas.topics import BATCH_ASSEMBLY, CATALOGUE, CURRICULUM, DEAD_LETTERS, EXPERIENCES, METRICS, RANKS, Topic

pytestmark = pytest.mark.slow
STEPS = {"disturbed": 40, "undisturbed": 4}
BROKEN_LINE = 7
TOO_LONG = "What is " + "1 + " * 600 + "1?"
GARBAGE = b"\x00\xffgarbage"
UNKNOWN_VERSION = [("content-type", b"application/json"), ("laminar-schema", b"Prompt/99")]
KEYS = {"experiences": b"p0", "replicas": b"rollout-0"}
VERIFIER = """
def touchy(text, answer):
    if len(text) % 3 == 0:
        raise RuntimeError("this one I will not judge")
    return float(len(text) % 2)
"""

Where = tuple[str, int, int]


@dataclass
class Ended:
    """Both ended runs, and the positions of the garbage in the topics of the disturbed one."""

    disturbed: LaminarRun
    undisturbed: LaminarRun
    garbage: dict[Where, bytes]
    client: ClientProperties

    def records(self, run: LaminarRun, topic: Topic) -> list[Any]:
        rows = (row for record in read_topic(self.client, topic.name(run.name)) for row in record.rows)
        return [row for row in rows if isinstance(row, topic.record_classes)]


def write_questions(file: Path) -> None:
    lines = [json.dumps({"question": f"{n} + {n} =", "answer": str(2 * n)}) for n in range(100)]
    lines[BROKEN_LINE - 1] = '{"question": "4 + 4 =", "answer"'
    lines[20] = json.dumps({"question": TOO_LONG, "answer": "601"})
    file.write_text("\n".join(lines) + "\n")


def write_garbage(broker: Broker, run: str) -> dict[Where, bytes]:
    """Write to every topic bytes without schema, a record of an unknown version, and a record of another topic."""
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers, acks="all")
    written = {}
    for topic in CATALOGUE.values():
        elsewhere, headers = encode(CommitNote("g", "{}", 1) if topic is METRICS else Metric("strange", 1, {}, 1))
        for value, of_it in ((GARBAGE, []), (b"{}", UNKNOWN_VERSION), (elsewhere, list(headers))):
            sent = producer.send(topic.name(run), value, KEYS.get(topic.short_name, b"x"), of_it, partition=0).get(10)
            written[sent.topic, sent.partition, sent.offset] = value
    producer.close()
    return written


def foreign_metrics() -> list[Metric]:
    """Metrics of another program that name a goal that is not reached, times to come, and phases."""
    now = time.time_ns() // 10**6
    return [
        Metric("trainer", 10**9, {"trajectories": 1e12}, now),
        Metric("evaluation", 10**9, {"accuracy/greedy": 1.0, "final": 1.0}, now),
        Metric("rollout", 0, {"cpu/process_seconds": 1.0}, 2**60),
        Metric("rollout", 0, {"cpu/process_seconds": 1.0}, now + 10**12),
        Metric("phase", 0, {}, now),
    ]


def write_metrics(broker: Broker, run: str) -> None:
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers, acks="all")
    for metric in foreign_metrics():
        value, headers = encode(metric)
        producer.send(METRICS.name(run), value, b"x", list(headers), partition=0)
    producer.close()


def read_by_pipelines(garbage: dict[Where, bytes]) -> dict[Where, bytes]:
    """The garbage in topics that pipelines of this run consume."""
    topics = {where: CATALOGUE[where[0].rpartition(".")[2]] for where in garbage}
    unread = (CURRICULUM, BATCH_ASSEMBLY, RANKS)  # not consumed without a curriculum, several shards and ranks
    read = {where for where, topic in topics.items() if {*topic.consumers} - {"autoscaler"} and topic not in unread}
    return {where: value for where, value in garbage.items() if where in read}


def letters_by_place(client: ClientProperties, run: LaminarRun) -> dict[Where, DeadLetter]:
    rows = [row for record in read_topic(client, DEAD_LETTERS.name(run.name)) for row in record.rows]
    letters = [row for row in rows if isinstance(row, DeadLetter)]
    topics = {short_name: topic.name(run.name) for short_name, topic in CATALOGUE.items()}
    return {(topics.get(each.topic, each.topic), each.partition, each.offset): each for each in letters}


@pytest.fixture(scope="module")
def ended(start_run: StartRun, emulated_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    folder = tmp_path_factory.mktemp("trouble")
    questions, verifier = folder / "questions.jsonl", folder / "verifier.py"
    write_questions(questions)
    verifier.write_text(VERIFIER)
    with start_broker(BrokerConfig(folder / "kafka")) as broker:
        client = ClientProperties.at(broker.bootstrap_servers)
        servers = f"kafka.bootstrap_servers={broker.bootstrap_servers}"
        steps = f"trainer.optimizer_steps={STEPS['disturbed']}"
        source = f'prompts={{source = "jsonl", path = "{questions}", samples_per_prompt = 4, max_new_tokens = 16}}'
        rewards = f'score.rewards=[{{name = "exact"}}, {{name = "{verifier}:touchy"}}]'
        here = tmp_path_factory.mktemp("here")
        near = "placement.prompt_lead=4"  # so that the garbage among the prompts is read long before the run's end
        disturbed = start_run("disturbed", servers, COMPACT, steps, source, rewards, near, here=here)
        slow_steps = "trainer.emulation.step_s=[[0, 300], [100000, 300]]"
        undisturbed = start_run("undisturbed", servers, slow_steps, config=emulated_config)
        undisturbed.until_phase("training")
        its_trainer = undisturbed.pid_of("trainer")
        os.kill(its_trainer, signal.SIGSTOP)  # so that the run does not end before the broker stops
        disturbed.until_phase("training")
        garbage = write_garbage(broker, disturbed.name)
        write_metrics(broker, disturbed.name)
        # Heartbeats and inboxes are read from the end at a start, so a restarted role would skip these records.
        wanted = set(read_by_pipelines(garbage))
        disturbed.until(
            lambda: wanted <= set(letters_by_place(client, disturbed)), 120, "a dead letter for each record"
        )
        for run in (disturbed, undisturbed):
            assert not any(role["restarts"] for role in run.state()["roles"].values()), run.state()
        os.kill(disturbed.pid_of(LIGHT), signal.SIGKILL)  # a restart reads back the roles' own records
        os.kill(its_trainer, signal.SIGCONT)
        broker.stop()
        for run in (disturbed, undisturbed):
            run.until(lambda run=run: "does not answer" in run.output(), 60, "the run notices the outage")
        broker.start()
        for run in (disturbed, undisturbed):
            run.wait(300)
        yield Ended(disturbed, undisturbed, garbage, client)


@pytest.mark.parametrize("name", ["disturbed", "undisturbed"])
def test_disturbed_runs_reach_their_goal_and_pass_the_audit(name: str, ended: Ended) -> None:
    run = {"disturbed": ended.disturbed, "undisturbed": ended.undisturbed}[name]
    assert run.exit_code() == 0, run.output()
    audit = run.audit()
    assert audit["passed"]
    assert (audit["lost"], audit["trained_twice"]) == (0, 0)
    # A group is smaller by its members whose reward failed, so a batch of whole groups may have a few more than 16.
    assert audit["trained"] >= STEPS[name] * 16
    assert name == "disturbed" or audit["trained"] == STEPS[name] * EMULATED["experience"]["global_batch"]
    assert not run.leftovers()


def test_runs_on_one_broker_are_isolated(ended: Ended) -> None:
    tasks = {
        run.name: {experience.trajectory.prompt.task for experience in ended.records(run, EXPERIENCES)}
        for run in (ended.disturbed, ended.undisturbed)
    }
    assert tasks == {"disturbed": {"questions"}, "undisturbed": {"synthetic"}}


def test_invalid_records_are_copied_to_dead_letters(ended: Ended) -> None:
    letters = letters_by_place(ended.client, ended.disturbed)
    for where, payload in read_by_pipelines(ended.garbage).items():
        assert letters[where].payload == payload
        assert letters[where].reason


def test_invalid_records_of_observed_topics_are_counted(ended: Ended) -> None:
    summary = json.loads((ended.disturbed.folder / "summary.json").read_text())
    assert summary["unreadable_records"] == {"metrics": 3 + len(foreign_metrics()), "relay": 3, "replicas": 3}
    for short_name in summary["unreadable_records"]:
        assert re.search(
            rf"^{short_name}, partition 0, offset \d+: unreadable record: ", ended.disturbed.output(), re.M
        )
    for short_name in ("plans", "metrics", "dead-letters", "restore"):
        records = read_topic(ended.client, CATALOGUE[short_name].name(ended.disturbed.name))
        assert sum(record.error is not None for record in records) == 2


def test_invalid_questions_are_reported_and_skipped(ended: Ended) -> None:
    letters = [letter for letter in ended.records(ended.disturbed, DEAD_LETTERS) if letter.step == "draw prompts"]
    broken = [letter for letter in letters if "not JSON" in letter.reason]
    too_long = [letter for letter in letters if letter.payload == TOO_LONG.encode()]
    assert {letter.offset for letter in broken} == {BROKEN_LINE}
    assert all(letter.topic.endswith("questions.jsonl") for letter in broken)
    assert len(broken) == 1
    assert too_long
    assert "512" in too_long[0].reason


def test_verifier_error_is_written_to_the_experience(ended: Ended) -> None:
    experiences: list[Experience] = ended.records(ended.disturbed, EXPERIENCES)
    failed = [experience for experience in experiences if experience.error]
    assert failed
    assert len(failed) < len(experiences)
    for experience in failed:
        assert len(experience.trajectory.text) % 3 == 0
        assert "this one I will not judge" in (experience.error or "")
        assert experience.reward == 0.0
