"""`laminar replicas` and `laminar plans` against a real broker: what they show, and what draining writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.producer import BoundedProducer
from infra.kafka.properties import ClientProperties
from infra.kafka.reading import read_topic
from pipelines.cli.main import main
from pipelines.cli.plans import COLUMNS, _alone, plan_lines
from pipelines.cli.replicas import replica_row
from schemas.codec import encode
from schemas.plain import to_plain
from schemas.records import Drain, MoveOutcome, PlannedMove, PolicyVersion, RepackPlan, ReplicaLoad, ReplicaStatus
from schemas.topics import INBOX, PLANS, REPLICAS

RUN = "replica-commands"
VERSION = PolicyVersion(1, 4)
PLAN = RepackPlan(
    plan_id="2-7",
    policy_version=VERSION,
    moves=(PlannedMove(0, 1, ("p3.0", "p3.1"), 100),),
    before=(ReplicaLoad(0, 100, 1000, 2), ReplicaLoad(1, 400, 1000, 9)),
    after=(ReplicaLoad(0, 0, 1000, 0), ReplicaLoad(1, 500, 1000, 11)),
    reason="repack",
    planned_at=1_700_000_000_000,
)
ENDS = [
    MoveOutcome("2-7", 0, 1, ("p3.0",), (), (), (), 1_700_000_002_000),
    MoveOutcome("2-7", 0, 1, (), (), ("p3.0",), (), 1_700_000_003_000),  # told again after a restart: the first counts
    *[MoveOutcome("2-6", 2, 3, (f"p1.{n}",), (), (), (), 1_700_000_004_000) for n in range(5)],
]
Laminar = Callable[..., tuple[int, str, str]]


def status(replica: int, sent_at: int = 0, tokens: int = 0, incarnation: int = 3, **changes: Any) -> ReplicaStatus:
    fields = {
        "replica": replica,
        "process": replica,
        "incarnation": incarnation,
        "state": "running",
        "policy_version": VERSION,
        "running": 2,
        "waiting": 1,
        "capacity": 8,
        "kv_used": 250,
        "kv_capacity": 1000,
        "tokens_generated": tokens,
        "step_seconds": 0.1,
        "host": "here",
        "pid": 77,
        "sent_at": sent_at,
        "run": RUN,
    }
    return ReplicaStatus(**(fields | changes))


@pytest.fixture(scope="module")
def filled(broker: Broker) -> ClientProperties:
    """A run with two replicas, of which one has stopped, and one plan, of which half is known."""
    client = ClientProperties.at(broker.bootstrap_servers)
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(REPLICAS.name(RUN), 1), TopicSpec(INBOX.name(RUN), 4)])
        create_topics(admin, [TopicSpec(PLANS.name(RUN), 1)])
    beats = [status(0, 1000, 50, incarnation=2), status(0, 2000, 10), status(0, 4000, 110), status(1, state="stopped")]
    with BoundedProducer(client) as producer:
        for topic, record in (*((REPLICAS, beat) for beat in beats), (PLANS, PLAN), *((PLANS, end) for end in ENDS)):
            value, headers = encode(record)
            producer.send(topic.name(RUN), value, key=b"k", headers=headers)
    return client


@pytest.fixture
def laminar(filled: ClientProperties, capsys: pytest.CaptureFixture[str]) -> Laminar:
    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*words, "--run", RUN, "-b", filled.bootstrap_servers])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


def test_replicas_are_shown_as_they_are_now(laminar: Laminar) -> None:
    code, out, _ = laminar("replicas", "--json")
    first, second = json.loads(out)
    assert code == 0
    assert (first["replica"], first["state"], first["version"], first["incarnation"]) == (0, "running", "1.4", 3)
    assert (first["kv_used"], first["kv_capacity"], first["running"], first["waiting"]) == (250, 1000, 2, 1)
    assert first["tokens_per_second"] == 50.0  # of this incarnation alone
    assert second["state"] == "stopped"
    _, out, _ = laminar("replicas")
    assert "25 %" in out
    assert "here, process 77" in out


def test_draining_writes_to_the_inbox_of_the_life_that_goes_on(laminar: Laminar, filled: ClientProperties) -> None:
    code, out, _ = laminar("replicas", "drain", "0", "--json")
    assert (code, json.loads(out)["drained"]) == (0, False)
    (record,) = read_topic(filled, INBOX.name(RUN))
    assert (record.partition, record.rows) == (0, (Drain(0, 3),))


@pytest.mark.parametrize(
    ("replica", "says"),
    [("5", "run replica-commands has no replica 5: there are 0, 1"), ("1", "replica 1 has stopped already")],
)
def test_what_cannot_drain_is_named(replica: str, says: str, laminar: Laminar) -> None:
    code, _, err = laminar("replicas", "drain", replica)
    assert (code, err) == (1, f"laminar: {says}\n")


def test_plans_show_each_move_the_load_before_and_after_and_what_became_of_it(laminar: Laminar) -> None:
    code, out, _ = laminar("plans", "--json")
    shown = json.loads(out)
    outcomes = {"handed_over": ["p3.0"], "finished": [], "rejected": [], "lost": [], "open": ["p3.1"]}
    assert {outcome: shown["moves"][0].pop(outcome) for outcome in outcomes} == outcomes
    assert (code, shown) == (0, to_plain(PLAN))
    _, out, _ = laminar("plans")
    assert out == (
        "2023-11-14 22:13:20 plan 2-7 (repack) under 1.4\n"
        "  0 → 1  2 trajectories of 100 KV tokens; KV use of replica 0 10 % → 0 %, replica 1 40 % → 50 %;"
        " 1 made, 1 open\n"
    )


def test_the_last_plans_are_shown_however_much_became_of_them(laminar: Laminar) -> None:
    assert laminar("plans", "-n", "0")[1] == ""
    for count in ("1", "2"):
        _, out, _ = laminar("plans", "-n", count, "--json")
        assert [json.loads(line)["plan_id"] for line in out.splitlines()] == ["2-7"]


def test_who_follows_is_told_what_became_of_a_move_when_it_is_known() -> None:
    told = _alone(replace(ENDS[0], finished=("p3.1", "p3.2"), lost=("p3.4",)))
    assert told.keys() >= set(COLUMNS)
    assert plan_lines(told) == (
        "2023-11-14 22:13:22 plan 2-7: 0 → 1  1 made, 2 finished before, 1 lost to a replica that was gone"
    )
    assert plan_lines(_alone(PLAN)).endswith("replica 1 40 % → 50 %; 2 open")


def test_one_trajectory_is_one_trajectory() -> None:
    plan = to_plain(PLAN)
    plan["moves"][0]["trajectory_ids"] = ["p3.0"]
    assert "1 trajectory of" in plan_lines(plan)


@pytest.mark.parametrize(
    ("beats", "expected"),
    [
        ([status(0, 1000, 5)], None),
        ([status(0, 1000, 5), status(0, 3000, 25)], 10.0),
        ([status(0, 0, 0), status(0, 90_000, 500), status(0, 92_000, 600)], 50.0),  # the last seconds alone
        ([status(0, 9000, 5), status(0, 3000, 25)], None),  # its clock was set back
    ],
)
def test_speed_is_of_the_last_heartbeats(beats: list[ReplicaStatus], expected: float | None) -> None:
    assert replica_row(beats, 100_000)["tokens_per_second"] == expected


@pytest.mark.parametrize(("running", "state"), [(1, "draining"), (0, "drained")])
def test_what_has_nothing_left_is_drained(running: int, state: str) -> None:
    row = replica_row([status(0, 1000, state="draining", running=running, waiting=0)], 3500)
    assert (row["state"], row["seconds_ago"]) == (state, 2.5)


def test_what_moves_before_it_has_begun_holds_nothing() -> None:
    plan = replace(PLAN, moves=(PlannedMove(0, 1, ("p3.0",), 0),), after=PLAN.before, reason="balance")
    said = plan_lines(to_plain(plan))
    assert "plan 2-7 (level)" in said
    assert "  0 → 1  1 trajectory not begun yet; KV use of replica 0 10 % → 10 %, replica 1 40 % → 40 %" in said
