"""`laminar runs upgrade` on a real Kafka, and the release of a run: who records it, and who follows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from kafka import KafkaProducer
from markers import wait_for_markers

from infra.kafka import run_release, session
from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.run_release import read_release, record_release
from infra.kafka.session_config import Partition, SessionConfig
from infra.kafka.sessions import Sessions
from pipelines.cli.options import Address
from pipelines.cli.upgrade import upgrade_command
from pipelines.config import Config, KafkaConfig, RunConfig, parse_config
from pipelines.run.topics import make_topics, settings_of
from pipelines.run.upgrade import refuse_new_role, upgrade_resumed
from schemas.codec import encode
from schemas.records import RunRelease
from schemas.release import FIRST, NEWEST, RELEASE, NewerRelease, NotInRelease, write_for, written_release
from schemas.topics import RESTORE, RUN_RELEASE, SCHEMAS, group_name

LATER = "9.0.0"


@pytest.fixture
def config(broker: Broker, run_id: str) -> Iterator[Config]:
    yield replace(parse_config({}, "a test"), run=RunConfig(run_id), kafka=KafkaConfig(broker.bootstrap_servers))
    write_for(NEWEST)


@pytest.fixture
def commit(config: Config, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Sessions]:
    """Starts a role, which commits its note; of the first release, which wrote no header, unless `newest`.

    `header` is the release in its note then.
    """

    def start(role: str, shard: int = 0, *, newest: bool, header: str = RELEASE) -> Sessions:
        client, run = config.kafka.client(), config.run.name
        monkeypatch.setattr(
            session, "NOTE_HEADER", (run_release.NOTE_HEADER[0], header.encode()) if newest else ("other", b"")
        )
        sessions = Sessions()
        group = group_name(run, role, shard)
        sessions.open(SessionConfig(client, group, (), Partition(RESTORE.name(run), 0)))
        sessions.close(group)
        wait_for_markers(client, RESTORE.name(run))
        return sessions

    return start


@pytest.fixture
def begun(config: Config, commit: Callable[..., Sessions]) -> Config:
    """A run with roles of 0.2.0, which had no topic for the release."""
    with admin_client(config.kafka.client()) as admin:
        create_topics(admin, [TopicSpec(RESTORE.name(config.run.name), 1, config=settings_of(RESTORE))])
    commit("score", newest=False)
    commit("placement", newest=False)
    make_topics(config)
    return config


def upgrade(config: Config, *ended: str) -> Any:
    return upgrade_command(Address(config.kafka.bootstrap_servers, None, config.run.name), ended=list(ended))


def test_new_run_has_the_newest_release(config: Config) -> None:
    make_topics(config)
    assert read_release(config.kafka.client(), config.run.name) == NEWEST
    make_topics(config)
    report = upgrade(config)
    assert (report.exit_code, report.text()) == (0, f"run {config.run.name} has release {NEWEST} already")


def test_upgrade_waits_for_all_roles(begun: Config, commit: Callable[..., Sessions]) -> None:
    client, run = begun.kafka.client(), begun.run.name
    assert read_release(client, run) == FIRST
    commit("score", newest=True)
    assert written_release() == FIRST
    report = upgrade(begun)
    assert (report.exit_code, report.data["release"]) == (1, FIRST)
    assert [role["role"] for role in report.data["older_roles"]] == ["placement.0"]
    assert "placement.0      0.2.0, last commit 2" in report.text()
    assert "runs upgrade" in report.text()
    assert read_release(client, run) == FIRST
    commit("placement", newest=True)
    report = upgrade(begun)
    assert (report.exit_code, report.data["before"], report.data["release"]) == (0, FIRST, NEWEST)
    commit("score", newest=True)
    assert written_release() == NEWEST


def test_upgrade_goes_on_without_roles_that_are_gone(begun: Config) -> None:
    assert upgrade(begun, "score.0").exit_code == 1
    assert upgrade(begun, "score.0", "placement.0").exit_code == 0
    assert read_release(begun.kafka.client(), begun.run.name) == NEWEST


def test_resume_upgrades_a_run_of_this_machine_alone(begun: Config, commit: Callable[..., Sessions]) -> None:
    client, run, notes = begun.kafka.client(), begun.run.name, list[str]()
    commit("rollout", 5, newest=False)
    upgrade_resumed(begun, notes.append)
    assert read_release(client, run) == FIRST
    assert [note.partition(":")[0] for note in notes] == ["rollout.5"]
    commit("rollout", 5, newest=True)
    upgrade_resumed(begun, notes.append)
    assert read_release(client, run) == NEWEST
    assert len(notes) == 1


def test_role_of_a_later_release_is_refused(config: Config, commit: Callable[..., Sessions]) -> None:
    make_topics(config)
    commit("placement", newest=True, header=f"{LATER}.dev3")
    record_release(config.kafka.client(), config.run.name, LATER)
    with pytest.raises(NewerRelease, match=rf"upgraded to release {LATER}, .*install"):
        commit("score", newest=True)
    with pytest.raises(NewerRelease, match="already"):
        upgrade(config)


def test_later_release_of_no_role_is_ignored(
    config: Config, commit: Callable[..., Sessions], caplog: pytest.LogCaptureFixture
) -> None:
    """Another program wrote it."""
    client, run, notes = config.kafka.client(), config.run.name, list[str]()
    make_topics(config)
    commit("placement", newest=True)
    record_release(client, run, LATER)
    commit("score", newest=True)
    assert f"release {LATER} in {SCHEMAS.name(run)} is ignored: no role of it has committed in this run" in caplog.text
    assert (written_release(), read_release(client, run)) == (NEWEST, NEWEST)
    upgrade_resumed(config, notes.append)
    assert (upgrade(config).exit_code, notes) == (0, [])


@pytest.mark.parametrize(
    ("roles", "release"), [({"score": True}, NEWEST), ({"score": True, "placement": False}, FIRST), ({}, None)]
)
def test_replaced_release_is_that_of_the_roles(
    roles: dict[str, bool], release: str | None, config: Config, commit: Callable[..., Sessions]
) -> None:
    """The topic is compacted: the record of another program may be the only one that is left."""
    client, run = config.kafka.client(), config.run.name
    with admin_client(client) as admin:
        names = (RESTORE, SCHEMAS)
        create_topics(admin, [TopicSpec(each.name(run), 1, config=settings_of(each)) for each in names])
    for role, newest in roles.items():
        commit(role, newest=newest)
    record_release(client, run, LATER)
    make_topics(config)
    assert read_release(client, run) == release


def test_agents_wait_for_the_upgrade(begun: Config) -> None:
    client, run = begun.kafka.client(), begun.run.name
    refuse_new_role(client, run, "score")
    with pytest.raises(NotInRelease, match=r"release 0\.2\.0 has no role gateway, .*laminar runs upgrade"):
        refuse_new_role(client, run, "gateway")
    record_release(client, run, NEWEST)
    refuse_new_role(client, run, "gateway")


def test_garbage_is_no_release(config: Config) -> None:
    make_topics(config)
    value, headers = encode(RunRelease("1.2.3"))
    producer = KafkaProducer(**config.kafka.client().producer())
    for bad in (b"", b"{}", value.replace(b"1.2.3", b"latest"), b"\xff" * 2000):
        producer.send(SCHEMAS.name(config.run.name), bad, RUN_RELEASE.encode(), list(headers), 0)
    producer.flush()
    producer.close()
    assert read_release(config.kafka.client(), config.run.name) == NEWEST
