"""Checks, before any record is written, that the settings of Kafka keep all records that a run needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kafka import KafkaAdminClient
from kafka.admin import ConfigResource, ConfigResourceType

from infra.counted import counted
from infra.kafka.admin import TopicSpec, replication_factors

Settings = Mapping[str, str]
_KEEPS_TRANSACTIONAL_IDS_MS = 24 * 3600 * 1000
_CHECKED = (
    "transaction.max.timeout.ms",
    "log.cleaner.enable",
    "transactional.id.expiration.ms",
    "offsets.retention.minutes",
    "min.insync.replicas",
    "default.replication.factor",
)
"""The settings of a broker that `broker_problems` judges."""
_NEWEST_ONLY = ("segment.bytes", "min.cleanable.dirty.ratio", "delete.retention.ms")
"""The settings of a compacted topic that bound how much a start reads."""
CLUSTER = "Kafka"
"""Where a permission is missing."""


@dataclass(frozen=True, slots=True)
class SettingProblem:
    """An unsuitable setting. `fatal`: a run would eventually stop or lose records."""

    where: str
    setting: str
    value: str
    needed: str
    why: str
    fatal: bool = True

    @property
    def place(self) -> str:
        """Where an administrator changes it; most of the brokers' settings hold from their next start."""
        if self.where == CLUSTER:
            return "with kafka-acls.sh --add"
        return "in server.properties" if self.where.startswith("broker ") else "with kafka-configs.sh --alter"

    def __str__(self) -> str:
        return f"{self.where}: {self.setting} is {self.value}, must be {self.needed}: {self.why}"


class UnsuitableKafka(RuntimeError):
    """The settings of a Kafka would lose records or stop the run; `detail_lines` has the problems, if several."""

    def __init__(self, problems: Sequence[SettingProblem]) -> None:
        self.problems = tuple(problems)
        what = str(problems[0]) if len(problems) == 1 else f"{len(problems)} settings"
        self.detail_lines = tuple(map(str, problems)) if len(problems) > 1 else ()
        places = " and ".join(dict.fromkeys(problem.place for problem in problems))
        super().__init__(f"this Kafka is unsuitable, change it {places}: {what}")


def find_problems(
    admin: KafkaAdminClient, specs: Sequence[TopicSpec], transaction_timeout_s: float
) -> list[SettingProblem]:
    """The problems in the settings of the brokers and of the existing topics of `specs`, and for those to create.

    Settings that this client may not read are a problem that is not fatal; all others are checked.
    """
    wanted = {spec.name: spec for spec in specs}
    copies = replication_factors(admin, list(wanted))
    new = [spec.replication_factor for spec in specs if spec.name not in copies]
    topics, brokers = topic_settings(admin, list(copies)), broker_settings(admin)
    return [
        *topic_problems(topics, wanted, copies),
        *broker_problems(brokers, transaction_timeout_s, new),
        *_unread("topic", topics),
        *_unread("broker", brokers),
    ]


def _unread(kind: str, settings: Mapping[str, Settings]) -> Iterator[SettingProblem]:
    """The problem that this client may not read all `settings`: kafka-python returns none then, and no error."""
    if unread := [name for name, held in sorted(settings.items()) if not held]:
        why = f"the settings of {counted(len(unread), kind)} could not be checked, such as those of {unread[0]}"
        setting = f"the permission DescribeConfigs of the {'cluster' if kind == 'broker' else 'topics'}"
        yield SettingProblem(CLUSTER, setting, "not granted", "granted", why, fatal=False)


def broker_problems(
    brokers: Mapping[str, Settings], transaction_timeout_s: float, new: Sequence[int] = ()
) -> list[SettingProblem]:
    """The problems in the settings of each broker, by its name; `new` are the replication factors of topics to create,
    where -1 is the broker's default."""
    return [
        each for name, held in sorted(brokers.items()) for each in _of_broker(name, held, transaction_timeout_s, new)
    ]


def topic_problems(
    topics: Mapping[str, Settings], wanted: Mapping[str, TopicSpec], copies: Mapping[str, int]
) -> list[SettingProblem]:
    """The problems in the settings of existing topics; `copies` are their replication factors."""
    return [
        each
        for name, held in sorted(topics.items())
        if name in wanted
        for each in _of_topic(name, held, wanted[name].config, copies.get(name, 1))
    ]


def broker_settings(admin: KafkaAdminClient) -> dict[str, dict[str, str]]:
    """The effective settings of each broker, by "broker N"; none where this client may not read them."""
    ids = [str(broker["broker_id"]) for broker in admin.describe_cluster()["brokers"]]
    resources = [ConfigResource(ConfigResourceType.BROKER, each) for each in ids]
    held = admin.describe_configs(resources, config_filter="all")["broker"]
    return {f"broker {each}": _values(held[each]) for each in ids}


def checked_broker_settings(admin: KafkaAdminClient) -> dict[str, dict[str, str]]:
    """The settings that `broker_problems` judges, by "broker N", of the brokers whose settings this client may read."""
    held = broker_settings(admin)
    return {
        broker: {name: values[name] for name in _CHECKED if name in values} for broker, values in held.items() if values
    }


def topic_settings(admin: KafkaAdminClient, topics: Sequence[str]) -> dict[str, dict[str, str]]:
    """The effective settings of each topic; none where this client may not read them."""
    resources = [ConfigResource(ConfigResourceType.TOPIC, name) for name in topics]
    held = admin.describe_configs(resources, config_filter="all")["topic"] if resources else {}
    return {name: _values(held[name]) for name in topics}


def _values(entries: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    return {key: entry["value"] for key, entry in entries.items()}


def _of_broker(
    where: str, held: Settings, transaction_timeout_s: float, new: Sequence[int]
) -> Iterator[SettingProblem]:
    wanted_ms = int(transaction_timeout_s * 1000)
    bound = held.get("transaction.max.timeout.ms")
    if bound is not None and int(bound) < wanted_ms:
        why = "transactions of kafka.transaction_timeout_s would be rejected; otherwise lower that setting"
        yield SettingProblem(where, "transaction.max.timeout.ms", bound, f"at least {wanted_ms}", why)
    if held.get("log.cleaner.enable") == "false":
        why = "compacted topics would grow without bound"
        yield SettingProblem(where, "log.cleaner.enable", "false", "true", why)
    kept = held.get("transactional.id.expiration.ms")
    if kept is not None and int(kept) < _KEEPS_TRANSACTIONAL_IDS_MS:
        why = "a pipeline that pauses longer is not fenced against its predecessor"
        yield SettingProblem(
            where, "transactional.id.expiration.ms", kept, f"at least {_KEEPS_TRANSACTIONAL_IDS_MS}", why
        )
    retained = held.get("offsets.retention.minutes")
    if retained is not None and int(retained) < 24 * 60:
        why = "`laminar topics lag` forgets pipelines that pause; a restart does not need these offsets"
        yield SettingProblem(where, "offsets.retention.minutes", retained, "at least 1440", why, fatal=False)
    replicas, default = held.get("min.insync.replicas"), held.get("default.replication.factor", "1")
    copies = min((int(default) if each == -1 else each for each in new), default=None)
    if replicas is not None and copies is not None and int(replicas) > copies:
        needed = f"at most {copies}, the replication factor of new topics"
        why = "no record could be written; otherwise raise kafka.replication_factor"
        yield SettingProblem(where, "min.insync.replicas", replicas, needed, why)


def _of_topic(name: str, held: Settings, wanted: Settings, copies: int) -> Iterator[SettingProblem]:
    for setting, needed in wanted.items():
        value = held.get(setting)
        if value is None or value == needed:
            continue
        if setting == "max.message.bytes":
            if int(value) < int(needed):
                yield SettingProblem(name, setting, value, f"at least {needed}", "large records would be rejected")
        elif setting.startswith("retention.") and wanted.get("retention.ms", "-1") != "-1":
            why = "kafka.metrics_hours is not what bounds the measurements that are kept; nothing else reads old ones"
            yield SettingProblem(name, setting, value, needed, why, fatal=False)
        elif setting in ("cleanup.policy", "retention.ms", "retention.bytes"):
            yield SettingProblem(
                name, setting, value, needed, "records that a restart or the audit needs would be deleted"
            )
        elif setting in _NEWEST_ONLY and float(value) > float(needed):
            why = "restarts read more old records, and take longer the longer the run is"
            yield SettingProblem(name, setting, value, f"at most {needed}", why, fatal=False)
    replicas = held.get("min.insync.replicas")
    if replicas is not None and int(replicas) > copies:
        needed = f"at most {copies}, the topic's replication factor"
        yield SettingProblem(name, "min.insync.replicas", replicas, needed, "no record could be written")
    if replicas == "1" and copies >= 3:
        why = "a record on a single broker is lost with that broker"
        yield SettingProblem(name, "min.insync.replicas", replicas, "at least 2", why, fatal=False)
    if held.get("unclean.leader.election.enable") == "true":
        why = "a lagging broker may become leader, and the records that it lacks are lost"
        yield SettingProblem(name, "unclean.leader.election.enable", "true", "false", why, fatal=False)
