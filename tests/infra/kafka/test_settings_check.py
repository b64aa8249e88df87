"""Settings that would lose records or stop a run are named before anything is written."""

from __future__ import annotations

import pytest

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from infra.kafka.settings_check import broker_problems, broker_settings, topic_problems, topic_settings

COMPACTED = {"cleanup.policy": "compact", "segment.bytes": "4194304", "min.cleanable.dirty.ratio": "0.1"}
COMPACTED["delete.retention.ms"] = "60000"
WINDOW = {"cleanup.policy": "delete", "retention.ms": "3600000", "retention.bytes": "-1"}
GOOD = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1", "max.message.bytes": "1000"}


@pytest.mark.parametrize(
    ("setting", "value", "copies", "fatal"),
    [
        ("cleanup.policy", "compact", 1, True),
        ("retention.ms", "604800000", 1, True),
        ("retention.bytes", "1000000", 1, True),
        ("max.message.bytes", "999", 1, True),
        ("min.insync.replicas", "2", 1, True),
        ("min.insync.replicas", "1", 3, False),
        ("unclean.leader.election.enable", "true", 1, False),
        ("segment.bytes", "1073741824", 1, False),
        ("min.cleanable.dirty.ratio", "0.5", 1, False),
        ("delete.retention.ms", "86400000", 1, False),
    ],
)
def test_topic_problem_names_setting_and_value(setting: str, value: str, copies: int, fatal: bool) -> None:
    needed = COMPACTED if setting in COMPACTED and setting != "cleanup.policy" else GOOD
    held = needed | {"min.insync.replicas": "1" if copies == 1 else "2", setting: value}
    (problem,) = topic_problems({"t": held}, {"t": TopicSpec("t", 1, config=needed)}, {"t": copies})
    assert (problem.where, problem.setting, problem.value, problem.fatal) == ("t", setting, value, fatal)
    assert f"t: {setting} is {value}, must be " in str(problem)


@pytest.mark.parametrize(
    ("setting", "value"), [("retention.ms", "-1"), ("retention.ms", "60"), ("retention.bytes", "1")]
)
def test_other_retention_of_measurements_is_a_warning(setting: str, value: str) -> None:
    (problem,) = topic_problems({"t": WINDOW | {setting: value}}, {"t": TopicSpec("t", 1, config=WINDOW)}, {"t": 1})
    assert (problem.setting, problem.value, problem.fatal) == (setting, value, False)
    assert "kafka.metrics_hours" in problem.why


@pytest.mark.parametrize(
    ("setting", "value", "fatal"),
    [
        ("transaction.max.timeout.ms", "59999", True),
        ("log.cleaner.enable", "false", True),
        ("transactional.id.expiration.ms", "3600000", True),
        ("offsets.retention.minutes", "60", False),
        ("min.insync.replicas", "3", True),
    ],
)
def test_broker_problem_names_setting_and_value(setting: str, value: str, fatal: bool) -> None:
    (problem,) = broker_problems({"broker 1": {"default.replication.factor": "2", setting: value}}, 60, new=[3, -1])
    assert (problem.where, problem.setting, problem.value, problem.fatal) == ("broker 1", setting, value, fatal)


def test_find_problems_on_a_real_broker(broker: Broker, run_id: str) -> None:
    short = f"{run_id}-short"
    with admin_client(ClientProperties.at(broker.bootstrap_servers)) as admin:
        create_topics(admin, [TopicSpec(run_id, 1, config=GOOD), TopicSpec(short, 1)])
        assert broker_problems(broker_settings(admin), transaction_timeout_s=60) == []
        held = topic_settings(admin, [run_id, short])
    wanted = {name: TopicSpec(name, 1, config=GOOD) for name in held}
    problems = topic_problems(held, wanted, dict.fromkeys(held, 1))
    assert [(problem.where, problem.setting) for problem in problems] == [(short, "retention.ms")]
