"""`laminar replicas` and `laminar plans` against a real broker: their output, and the record that a drain publishes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from role_writer import write_as_role

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.note import Note
from infra.kafka.producer import BoundedProducer
from infra.kafka.properties import ClientProperties
from infra.kafka.topic_reader import read_topic
from pipelines.cli.plans import COLUMNS, _schema, _single_row, plan_lines
from pipelines.cli.replicas import replica_row
from pipelines.present.output import Form, RowOutput, show
from schemas.codec import encode
from schemas.plain import to_plain
from schemas.records import (
    CommitNote,
    Drain,
    GroupPlan,
    MoveOutcome,
    PlannedMove,
    PolicyVersion,
    RepackPlan,
    ReplicaLoad,
    ReplicaStatus,
    Stage,
    StageStatus,
)
from schemas.topics import INBOX, PLANS, REPLICAS, RESTORE, group_name

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
    MoveOutcome("2-7", 0, 1, (), (), ("p3.0",), (), 1_700_000_003_000),  # repeated after a restart: the first counts
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


def stage(replica: int, incarnation: int = 3, **changes: Any) -> StageStatus:
    fields = {"refusal": "", "version": VERSION, "group": "g3-1", "leads": True, "first": 0, "end": 2}
    place = {"replica": replica, "incarnation": incarnation, "host": "here", "store": "/s", "address": "here:9"}
    return StageStatus(**{**place, **fields, "failed": "", "error": "", "lost": (), "sent_at": 4000, **changes})


def make_topics(client: ClientProperties, run: str) -> None:
    partitions = {REPLICAS: 1, INBOX: 4, PLANS: 1, RESTORE: 1}
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(topic.name(run), count) for topic, count in partitions.items()])


@pytest.fixture(scope="module")
def filled(broker: Broker) -> ClientProperties:
    """A run with three replicas, and one plan with one known and one open outcome: one replica leads a stage group, one
    has stopped, and one has no weights."""
    client = ClientProperties.at(broker.bootstrap_servers)
    make_topics(client, RUN)
    group = group_name(RUN, "placement")
    write_as_role(client, RUN, RESTORE, [CommitNote(group, Note().encode(), 0)], key=group.encode())
    heartbeats = [
        status(0, 1000, 50, incarnation=2),
        status(0, 2000, 10),
        status(0, 4000, 110, kv_address="here:7401"),
        status(1, state="stopped", unreachable=("here:7401",)),
        status(2, state="starting", policy_version=None, unreachable=("here:7401",), host="there"),
        stage(0, incarnation=2, group="g2-9"),
        stage(0),
        stage(1),
        stage(2, group="", leads=False, refusal="its model does not have the layout of llama"),
    ]
    plans = [PLAN, *ENDS]
    with BoundedProducer(client) as producer:
        for topic, record in (*((REPLICAS, each) for each in heartbeats), *((PLANS, each) for each in plans)):
            value, headers = encode(record)
            producer.send(topic.name(RUN), value, key=b"k", headers=headers)
    return client


@pytest.fixture
def laminar(filled: ClientProperties, command: Laminar) -> Laminar:
    return lambda *words: command(*words, "--run", RUN, "-b", filled.bootstrap_servers)


def test_replicas_shows_current_state(laminar: Laminar) -> None:
    code, out, _ = laminar("replicas", "--json")
    first, second, third = json.loads(out)
    assert code == 0
    assert (first["replica"], first["state"], first["version"], first["incarnation"]) == (0, "running", "1.4", 3)
    assert (first["kv_used"], first["kv_capacity"], first["running"], first["waiting"]) == (250, 1000, 2, 1)
    assert first["tokens_per_s"] == 50.0  # of this incarnation only
    assert (first["group"], first["leads"], first["layers"], first["refusal"]) == ("g3-1", True, [0, 2], "")
    assert (second["state"], second["group"], second["layers"]) == ("stopped", None, None)
    assert (third["group"], third["refusal"]) == (None, "its model does not have the layout of llama")
    assert [each["reported_by"] for each in (first, second, third)] == [["2 of there"], [], []]
    _, out, _ = laminar("replicas")
    assert "2 of there (here:7401)" in out
    assert "g3-1 (leads): layers 0-1" in out
    assert "none: its model does not have the layout of llama" in out
    assert "25 %" in out
    assert "here, pid 77" in out


def test_drain_is_refused_before_placement_has_started(broker: Broker, run_id: str, command: Laminar) -> None:
    client = ClientProperties.at(broker.bootstrap_servers)
    make_topics(client, run_id)
    value, headers = encode(status(0, 1000))
    with BoundedProducer(client) as producer:
        producer.send(REPLICAS.name(run_id), value, key=b"k", headers=headers)
    code, _, err = command("replicas", "drain", "0", "--run", run_id, "-b", broker.bootstrap_servers)
    assert (code, f"placement of run {run_id} has not started yet" in " ".join(err.split())) == (1, True)
    assert not list(read_topic(client, INBOX.name(run_id)))


def test_drain_is_sent_to_current_incarnation(laminar: Laminar, filled: ClientProperties) -> None:
    code, out, _ = laminar("replicas", "drain", "0", "--json")
    assert (code, json.loads(out)["drained"]) == (0, False)
    (record,) = read_topic(filled, INBOX.name(RUN))
    assert (record.partition, record.rows) == (0, (Drain(0, 3),))


@pytest.mark.parametrize(
    ("replica", "message"),
    [("5", "run replica-commands has no replica 5; its replicas: 0, 1, 2"), ("1", "replica 1 has stopped already")],
)
def test_drain_rejects_unknown_and_stopped_replicas(replica: str, message: str, laminar: Laminar) -> None:
    code, _, err = laminar("replicas", "drain", replica)
    assert (code, err) == (1, f"laminar: {message}\n")


def test_plans_shows_moves_load_and_outcomes(laminar: Laminar) -> None:
    code, out, _ = laminar("plans", "--json")
    (shown,) = json.loads(out)
    outcomes = {"handed_over": ["p3.0"], "finished": [], "rejected": [], "lost": [], "open": ["p3.1"]}
    assert {outcome: shown["moves"][0].pop(outcome) for outcome in outcomes} == outcomes
    assert (code, shown) == (0, to_plain(PLAN))
    _, out, _ = laminar("plans")
    assert out == (
        "2023-11-14 22:13:20 plan 2-7 (repack), policy version 1.4\n"
        "  0 → 1  2 trajectories with 100 KV tokens; KV use of replica 0 10 % → 0 %, replica 1 40 % → 50 %;"
        " 1 handed over, 1 open\n"
    )


def test_plans_finds_last_plans_among_many_outcomes(laminar: Laminar) -> None:
    assert laminar("plans", "-n", "0")[1] == ""
    for count in ("1", "2"):
        _, out, _ = laminar("plans", "-n", count, "--json")
        assert [plan["plan_id"] for plan in json.loads(out)] == ["2-7"]


def test_plans_follow_shows_outcome_as_own_row() -> None:
    row = _single_row(replace(ENDS[0], finished=("p3.1", "p3.2"), lost=("p3.4",)))
    assert row.keys() >= set(COLUMNS)
    assert plan_lines(row) == (
        "2023-11-14 22:13:22 plan 2-7: 0 → 1  1 handed over, 2 finished before, 1 lost with a replica"
    )
    assert plan_lines(_single_row(PLAN)).endswith("replica 1 40 % → 50 %; 2 open")


@pytest.mark.parametrize("form", ["table", "csv", "csv-raw", "arrow", "json", "jsonl", "lines"])
def test_plans_of_all_kinds_are_one_table(form: Form, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    group = GroupPlan("g3-2", VERSION, (Stage(0, 3, "a:1", 0, 2),), "formed", "", -1.0, "", 0)
    rows = [[_single_row(each)] for each in (PLAN, ENDS[0], group)]
    show(RowOutput(rows, COLUMNS, form, line=plan_lines, schema=_schema))
    out = capfdbinary.readouterr().out
    if form == "arrow":
        shown = pa.ipc.open_stream(out).read_all().to_pylist()
        assert [(each["plan_id"], each["ended_at"], bool(each["stages"])) for each in shown] == [
            ("2-7", None, False),
            ("2-7", ENDS[0].ended_at, False),
            ("g3-2", None, True),
        ]
        assert (shown[0]["moves"][0]["open"], shown[1]["moves"][0]["open"]) == (["p3.0", "p3.1"], None)
        assert all(row[0].keys() <= each.keys() for row, each in zip(rows, shown, strict=True))
    else:
        assert b"g3-2" in out


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({}, "group g3-2 (stages formed), policy version 1.4: replica 0 layers 0-1, replica 1 layers 2-3"),
        ({"action": "changed", "replaces": "g3-1", "seconds_left": 9.6}, "; replaces g3-1; whole in 10 s"),
        ({"action": "failed", "note": "its leader does not reply"}, "2-3; its leader does not reply"),
    ],
)
def test_plan_lines_of_stage_group(changes: dict[str, Any], end: str) -> None:
    stages = (Stage(0, 3, "a:1", 0, 2), Stage(1, 3, "b:1", 2, 4))
    row = _single_row(replace(GroupPlan("g3-2", VERSION, stages, "formed", "", -1.0, "", 0), **changes))
    assert row.keys() >= set(COLUMNS)
    assert plan_lines(row).endswith(end)


def test_plan_lines_use_singular_for_one_trajectory() -> None:
    plan = to_plain(PLAN)
    plan["moves"][0]["trajectory_ids"] = ["p3.0"]
    assert "1 trajectory with" in plan_lines(plan)


@pytest.mark.parametrize(
    ("heartbeats", "expected"),
    [
        ([status(0, 1000, 5)], None),
        ([status(0, 1000, 5), status(0, 3000, 25)], 10.0),
        ([status(0, 0, 0), status(0, 90_000, 500), status(0, 92_000, 600)], 50.0),  # only the last seconds count
        ([status(0, 9000, 5), status(0, 3000, 25)], None),  # its clock was set back
    ],
)
def test_replica_row_rate_uses_last_heartbeats(heartbeats: list[ReplicaStatus], expected: float | None) -> None:
    assert replica_row(heartbeats, 100_000)["tokens_per_s"] == expected


@pytest.mark.parametrize(("running", "state"), [(1, "draining"), (0, "drained")])
def test_replica_row_is_drained_when_idle(running: int, state: str) -> None:
    row = replica_row([status(0, 1000, state="draining", running=running, waiting=0)], 3500)
    assert (row["state"], row["heartbeat_age_s"]) == (state, 2.5)


def test_plan_lines_of_move_not_started() -> None:
    plan = replace(PLAN, moves=(PlannedMove(0, 1, ("p3.0",), 0),), after=PLAN.before, reason="balance")
    text = plan_lines(to_plain(plan))
    assert "plan 2-7 (balance)" in text
    assert "  0 → 1  1 trajectory not started; KV use of replica 0 10 % → 10 %, replica 1 40 % → 40 %" in text
