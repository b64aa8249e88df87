"""A local broker that asks: its own authority, a user for each role, and for each no more than its role needs."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka import KafkaProducer
from kafka.errors import TopicAuthorizationFailedError
from waiting import until

from infra.deploy.role_acls import ENDS_RUN, EXPORT, IMPORT, JOINING, OBSERVED, role_acls
from infra.kafka.acls import CLUSTER_NAME, Acl, acl_command, create_acls
from infra.kafka.admin import TopicSpec, admin_client, create_topics, list_topics
from infra.kafka.broker import Broker, BrokerConfig, start_broker
from infra.kafka.properties import ClientProperties
from infra.kafka.readiness import connection_problem
from infra.kafka.session import Outgoing, Session, SessionLost
from infra.kafka.session_config import Input, Partition, SessionConfig
from infra.kafka.settings_check import SettingProblem, find_problems
from pipelines.cli import options
from pipelines.cli.main import main
from pipelines.roles import PIPELINES
from schemas import records as r
from schemas.codec import encode
from schemas.columns import flags, floats, token_ids
from schemas.records import Metric
from schemas.topics import (
    CATALOGUE,
    DEAD_LETTERS,
    EXPERIENCES,
    METRICS,
    RESTORE,
    RUN_FILES,
    TRAJECTORIES,
    group_name,
    run_prefix,
)

RUN = "first"
GUEST = "guest"
"""A user who may see the topics, and no settings."""


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    users = ("score", "trainer", "people", EXPORT, IMPORT, GUEST)
    with start_broker(BrokerConfig(tmp_path_factory.mktemp("secure"), secure=True, users=users)) as broker:
        with admin_client(broker.client()) as admin:
            create_topics(admin, [TopicSpec(topic.name(RUN), 1) for topic in CATALOGUE.values()])
        assert create_acls(broker.client(), role_acls(RUN, (*PIPELINES, IMPORT))) > 50
        assert create_acls(broker.client(), [Acl(GUEST, "topic", run_prefix(RUN), True, ("Describe",))]) == 1
        until(lambda: may_start(broker))
        yield broker


def may_start(broker: Broker) -> bool:
    """Whether the broker applies the lists: it learns them from the controller, and roles begin again until then."""
    try:
        session(broker, "score", group_name(RUN, "score")).close()
    except SessionLost:
        return False
    return True


def session(broker: Broker, user: str, group: str) -> Session:
    asked, answered = Partition(TRAJECTORIES.name(RUN), 0), Partition(EXPERIENCES.name(RUN), 0)
    inputs, restore = (Input(asked.topic, (0,)),), Partition(RESTORE.name(RUN), 0)
    return Session(SessionConfig(broker.client(user), group, inputs, restore, ledger=(answered,)))


def outgoing(short_name: str) -> Outgoing:
    value, headers = encode(Metric("a", 1, {}, 0))
    return Outgoing(CATALOGUE[short_name].name(RUN), 0, None, value, headers)


def test_secure_broker_allows_a_role_only_its_work(secure: Broker) -> None:
    mine = session(secure, "score", group_name(RUN, "score"))
    try:
        mine.commit([outgoing("experiences"), outgoing(DEAD_LETTERS.short_name)], mine.positions(), {}, {})
        with pytest.raises(SessionLost, match="TopicAuthorizationFailed"):
            mine.commit([outgoing("batches")], mine.positions(), {}, {})
    finally:
        mine.close()
    with pytest.raises(SessionLost, match="TransactionalIdAuthorizationFailed"):
        session(secure, "score", group_name(RUN, "trainer"))


def test_secure_broker_limits_observers_and_strangers(secure: Broker) -> None:
    with admin_client(secure.client("people")) as admin:
        assert set(list_topics(admin)) == {topic.name(RUN) for topic in CATALOGUE.values()}
    producer = KafkaProducer(**secure.client("people").producer())
    with pytest.raises(TopicAuthorizationFailedError):
        producer.send(METRICS.name(RUN), b"x").get(10)
    producer.close()
    assert connection_problem(ClientProperties.at(secure.bootstrap_servers).admin(), 1.0)
    known = secure.client("people").entries
    guessed = known["sasl.jaas.config"].replace("${file:", "x")
    assert connection_problem(ClientProperties({**known, "sasl.jaas.config": guessed}).admin(), 1.0)


def experience(member: int) -> r.Experience:
    version = r.PolicyVersion(1, 1)
    prompt = r.Prompt(0, "train", "sums", "1 + 1", token_ids([1]), "{}", 2, r.Sampling(1.0, 1.0, 0, 8, (), 0))
    response = r.Response(token_ids([5]), floats([-0.5]), flags([True]))
    spans = (r.VersionSpan(version, 1),)
    trajectory = r.Trajectory(prompt, member, 1, 1, 0, 1, response, "2", spans, version, "stop", None, 0, None, 0)
    return r.Experience(trajectory, 1.0, (), None, 0)


def test_export_and_import_work_as_their_own_users(
    secure: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = session(secure, "score", group_name(RUN, "score"))
    value, headers = encode(experience(0), experience(1))
    place = Partition(EXPERIENCES.name(RUN), 0)
    mine.commit([Outgoing(*place, b"p0", value, headers)], mine.positions(), {}, {})
    mine.close()
    folder, done = str(tmp_path / "data"), {}
    for user, words in ((EXPORT, ("export", "experiences", folder)), (IMPORT, ("import", folder))):
        file = secure.config.security.properties_file(user)
        with pytest.raises(SystemExit) as ended:
            main([*words, "--run", RUN, "-F", str(file), "--json"])
        printed = capsys.readouterr()
        assert not ended.value.code, printed.err
        done[user] = json.loads(printed.out)
    assert done[EXPORT]["rows"] == done[IMPORT]["trajectories"] >= 2


def problems_of(broker: Broker, user: str) -> list[SettingProblem]:
    """Those that `user` finds, for topics that must keep their records and a time-out longer than the brokers allow."""
    specs = [TopicSpec(topic.name(RUN), 1, config={"retention.ms": "-1"}) for topic in (EXPERIENCES, METRICS)]
    with admin_client(broker.client(user)) as admin:
        return find_problems(admin, specs, 4000)


def test_settings_that_a_user_may_read_are_checked(secure: Broker) -> None:
    def found(user: str) -> list[tuple[str, bool]]:
        return sorted({(each.setting, each.fatal) for each in problems_of(secure, user)})

    topics, brokers = ("retention.ms", True), ("transaction.max.timeout.ms", True)
    refused = [(f"the permission DescribeConfigs of the {each}", False) for each in ("cluster", "topics")]
    assert found("score") == [topics, brokers]
    until(lambda: found(GUEST) == refused)
    may = Acl(GUEST, "cluster", CLUSTER_NAME, False, ("DescribeConfigs",))
    assert "--cluster" in acl_command(may, "kafka:9092", "")
    create_acls(secure.client(), [may])
    until(lambda: found(GUEST) == [refused[1], brokers])
    assert "such as those of laminar.first.experiences" in problems_of(secure, GUEST)[-1].why
    create_acls(secure.client(), [Acl(GUEST, "topic", run_prefix(RUN), True, ("DescribeConfigs",))])
    until(lambda: found(GUEST) == [topics, brokers])


def test_export_with_wrong_credentials_leaves_no_files(
    secure: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "CONNECT_TIMEOUT_S", 1.0)  # no attempt succeeds
    known = dict(secure.client("people").entries)
    jaas = known["sasl.jaas.config"]
    guessed = known | {"sasl.jaas.config": jaas.replace(jaas.partition('password="')[2].partition('"')[0], "guessed")}
    open_text = {"bootstrap.servers": secure.bootstrap_servers}
    for entries, reason in ((guessed, "are login and certificates correct?"), (open_text, "Kafka does not respond")):
        file = tmp_path / "client.properties"
        file.write_text("".join(f"{name}={value}\n" for name, value in entries.items()))
        with pytest.raises(SystemExit, match="1"):
            main(["export", "settled", str(tmp_path / "data"), "--run", RUN, "-F", str(file)])
        (line,) = capsys.readouterr().err.splitlines()
        assert reason in line
        assert "guessed" not in line
        assert not (tmp_path / "data").exists()


def test_secrets_are_private_and_not_on_command_lines(secure: Broker) -> None:
    import psutil

    folder = secure.config.security.folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for file in [*folder.iterdir(), secure.config.data_dir / "server.properties"]:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    password = (folder / "score.password").read_text().strip()
    assert password not in " ".join(psutil.Process(secure.pid).cmdline())
    assert password not in (folder / "score.properties").read_text()
    assert not (secure.config.data_dir / "format.arguments").exists()


def test_secure_broker_keeps_users_after_restart(secure: Broker) -> None:
    secure.restart()
    mine = session(secure, "score", group_name(RUN, "score"))
    mine.close()


def test_acl_command_matches_created_acls() -> None:
    acl = Acl("score", "topic", TRAJECTORIES.name(RUN), False, ("Read",))
    said = acl_command(acl, "kafka:9092", "admin.properties")
    assert said == (
        "kafka-acls.sh --bootstrap-server kafka:9092 --command-config admin.properties --add "
        f"--allow-principal User:score --operation Read --topic {TRAJECTORIES.name(RUN)}"
    )
    assert acl_command(Acl("a", "group", "b", True, ("Read",)), "k:1", "").endswith(
        "--group b --resource-pattern-type prefixed"
    )


def test_acls_of_roles_match_the_catalogue() -> None:
    lists = role_acls(RUN, PIPELINES)
    for role in PIPELINES:
        mine = [acl for acl in lists if acl.user == role and acl.resource == "topic" and not acl.prefixed]
        written = {acl.name for acl in mine if "Write" in acl.operations}
        said = {t.name(RUN) for t in CATALOGUE.values() if {role, "every pipeline"} & set(t.producers)}
        assert written == said
        read = {acl.name for acl in mine if "Read" in acl.operations}
        observed = OBSERVED if role == ENDS_RUN else ()
        assert read == said | {t.name(RUN) for t in CATALOGUE.values() if role in t.consumers or t in observed} | (
            {RUN_FILES.name(RUN)} if role in JOINING else set()
        )
    ids = {acl.user for acl in lists if acl.resource == "transactional-id" and ".rollout." in acl.name}
    assert ids == {"rollout", "placement"}


def test_secure_broker_files_are_in_its_folder(tmp_path: Path) -> None:
    made = BrokerConfig(tmp_path).security
    made.create(("score",))
    before = (made.folder / "ca.pem").read_text()
    made.create(("score", "later"))
    assert (made.folder / "ca.pem").read_text() == before
    assert made.users == ["admin", "broker", "later", "score"]
