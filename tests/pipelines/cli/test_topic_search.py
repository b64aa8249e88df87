"""`laminar topics find`, `stats`, `get`, `offsets`, `dlq`, and `tail` in kcat's formats, against a real broker."""

from __future__ import annotations

import csv
import functools
import io
import json
from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pytest
from kafka import KafkaProducer
from record_samples import SAMPLES

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.lag import list_groups
from infra.kafka.properties import ClientProperties
from infra.kafka.topic_reader import read_topic
from pipelines.cli.main import main
from schemas.codec import encode
from schemas.records import DeadLetter, Settled
from schemas.topics import DEAD_LETTERS, SETTLED, run_prefix

RUN = "topic-search"
SETTLED_SAMPLE = next(record for record in SAMPLES.values() if isinstance(record, Settled))
Laminar = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def filled(broker: Broker) -> ClientProperties:
    return fill(broker, RUN)


def fill(broker: Broker, run: str) -> ClientProperties:
    """Twenty settled trajectories on two partitions, an undecodable record, and three dead letters: of that record, of
    the one before, and of a deleted one. Record n has the timestamp 1,700,000,000 + n seconds.
    """
    client = ClientProperties.at(broker.bootstrap_servers)
    settled, letters = SETTLED.name(run), DEAD_LETTERS.name(run)
    with admin_client(client) as admin:
        unlimited = {"retention.ms": "-1"}  # the timestamps are older than the default retention
        create_topics(admin, [TopicSpec(settled, 2, config=unlimited), TopicSpec(letters, 1)])
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers)
    for number in range(20):
        outcome = "dropped" if number % 5 == 0 else "batched"
        value, headers = encode(replace(SETTLED_SAMPLE, trajectory_id=f"p{number}.0", outcome=outcome, tokens=number))
        at = 1_700_000_000_000 + 1000 * number
        producer.send(settled, value, b"k", list(headers), number % 2, timestamp_ms=at)
    producer.send(settled, b"\xff", b"odd", [("mine", b"1")], 0, timestamp_ms=1_700_000_100_000)
    for offset, topic in ((10, "settled"), (9, settled), (99, "settled")):  # older releases wrote the full name
        value, headers = encode(DeadLetter("read settled", "no laminar-schema header", topic, 0, offset, b"\xff", 0))
        producer.send(letters, value, headers=list(headers), partition=0)
    producer.flush()
    producer.close()
    return client


@pytest.fixture
def laminar(filled: ClientProperties, capfdbinary: pytest.CaptureFixture[bytes]) -> Laminar:
    def call(*words: str, raw: bool = False, run: str = RUN) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*words, "--run", run, "-b", filled.bootstrap_servers])
        printed = capfdbinary.readouterr()
        out = printed.out if raw else printed.out.decode()
        return int(ended.value.code or 0), out, printed.err.decode()  # type: ignore[return-value]

    return call


def ids(printed: tuple[int, str, str]) -> list[str]:
    return sorted(json.loads(line)["trajectory_id"] for line in printed[1].splitlines())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("-w", "outcome = 'dropped'"), ["p0.0", "p10.0", "p15.0", "p5.0"]),
        (("-w", "outcome = 'dropped' and tokens > 9"), ["p10.0", "p15.0"]),
        (("-w", "outcome = 'dropped'", "-n", "1"), ["p0.0"]),
        (("-o", "8", "-w", "kafka_partition = 1"), ["p17.0", "p19.0"]),
        (("-o", "-1", "-p", "1"), ["p19.0"]),
        (("-o", ":2", "-p", "0"), ["p0.0", "p2.0"]),
        (("-o", "s@1700000017000", "-o", "e@1700000019000"), ["p17.0", "p18.0"]),
        (("-n", "0"), []),
    ],
)
def test_topics_find_selects_matching_rows(laminar: Laminar, words: tuple[str, ...], expected: list[str]) -> None:
    assert ids(laminar("topics", "find", "settled", *words, "-O", "jsonl")) == expected


def test_find_prints_same_rows_in_every_format(laminar: Laminar) -> None:
    words = ("topics", "find", "settled", "-w", "tokens in (3, 4)", "--columns", "tokens,outcome", "-O")
    rows = [{"tokens": 4, "outcome": "batched"}, {"tokens": 3, "outcome": "batched"}]
    assert json.loads(laminar(*words, "json")[1]) == json.loads(laminar(*words[:-1], "--json")[1]) == rows
    assert [json.loads(line) for line in laminar(*words, "jsonl")[1].splitlines()] == rows
    assert list(csv.reader(io.StringIO(laminar(*words, "csv")[1])))[1:] == [["4", "batched"], ["3", "batched"]]
    stream = pa.ipc.open_stream(laminar(*words, "arrow", raw=True)[1])
    assert stream.read_all().to_pylist() == rows
    assert "TOKENS" in laminar(*words, "table")[1]
    assert laminar(*words, "lines")[1].splitlines() == ['{tokens=4 outcome="batched"}', '{tokens=3 outcome="batched"}']


def test_option_o_is_the_offset_and_capital_o_the_format(laminar: Laminar) -> None:
    words = ("topics", "find", "settled", "-o", "-1", "-p", "1", "--columns", "tokens", "-O")
    assert laminar(*words, "csv")[1] == "tokens\n19\n"
    assert laminar(*words, "json")[1] == '[\n{"tokens":19}\n]\n'
    assert laminar("topics", "stats", "settled", "-O", "csv")[1].splitlines()[0] == "column,min,mean,max"
    assert json.loads(laminar("topics", "offsets", "settled", "-O", "jsonl")[1].splitlines()[1])["partition"] == 1
    assert laminar("topics", "dlq", "list", "-O", "csv")[1].splitlines()[1].startswith("0:0,")


def test_tail_has_domain_columns_in_every_format(laminar: Laminar) -> None:
    words = ("topics", "tail", "settled", "-p", "0", "-o", "9:11", "-O")
    first, second = csv.DictReader(io.StringIO(laminar(*words, "csv")[1]))
    values = [first[name] for name in ("offset", "trajectory", "version", "staleness", "reward", "tokens", "lease")]
    assert values == ["9", "p18.0", "", "1", "", "18", ""]
    assert (second["offset"], second["value"], second["error"]) == ("10", "", "no laminar-schema header")
    rows = pa.ipc.open_stream(laminar(*words, "arrow", raw=True)[1]).read_all()
    assert rows["tokens"].to_pylist() == [18, None]
    head, *lines = laminar(*words, "table")[1].splitlines()
    assert head.split()[-3:] == ["TOKENS", "LEASE", "ERROR"]
    assert len(lines) == 2


def test_topics_stats(laminar: Laminar) -> None:
    stats = json.loads(laminar("topics", "stats", "settled", "--json")[1])
    assert (stats["records"], stats["rows"], stats["undecodable"]) == (21, 20, 1)
    assert stats["schemas"] == {"Settled/2": 20, "none": 1}
    assert stats["columns"]["tokens"] == {"min": 0, "mean": 9.5, "max": 19}
    assert (stats["first_at"], stats["last_at"]) == (1_700_000_000_000, 1_700_000_100_000)
    assert "20 Settled/2" in laminar("topics", "stats", "settled")[1]


def test_topics_get(laminar: Laminar) -> None:
    assert json.loads(laminar("topics", "get", "settled", "1:3")[1])["rows"][0]["trajectory_id"] == "p7.0"
    code, _, err = laminar("topics", "get", "settled", "1:99")
    assert (code, "its offsets are 0 to 9" in err) == (1, True)
    assert laminar("topics", "get", "settled", "here")[0] == 2


def test_topics_offsets(laminar: Laminar) -> None:
    rows = json.loads(laminar("topics", "offsets", "settled", "--at", "1700000010000", "--json")[1])
    assert rows[0] == {"partition": 0, "beginning": 0, "end": 11, "held_back": 0, "at": 5}
    assert rows[1]["at"] == 5


def test_tail_prints_kcat_formats(laminar: Laminar) -> None:
    words = ("topics", "tail", "settled", "-p", "0", "-o", "9:11")
    assert (
        laminar(*words, "--format", "%p:%o %k %K %T %h %%\\t.\\n")[1].splitlines()[1]
        == "0:10 odd 3 1700000100000 mine=1 %\t."
    )
    first, second = (json.loads(line) for line in laminar(*words, "-J")[1].splitlines())
    assert set(first) == {"topic", "partition", "offset", "tstype", "ts", "broker", "headers", "key", "payload"}
    assert json.loads(first["payload"])["trajectory_id"] == "p18.0"
    assert (second["payload"], second["headers"]) == (None, ["mine", "1"])
    assert laminar(*words, "--format", "%q")[0] == 2


def test_dlq_replay_publishes_records_with_execute(laminar: Laminar, broker: Broker, run_id: str) -> None:
    filled, dlq = fill(broker, run_id), functools.partial(laminar, "topics", "dlq", run=run_id)
    assert len(json.loads(dlq("list", "--json")[1])) == 3
    assert json.loads(dlq("list", "-w", "reason ~ 'other'", "--json")[1]) == []
    code, out, _ = dlq("replay")
    assert code == 1  # one record is deleted
    assert "would be sent" in out
    assert "none: deleted by retention" in out
    assert "Use --execute" in out
    name = SETTLED.name(run_id)
    before = len(list(read_topic(filled, name)))
    dlq("replay", "--execute")
    *_, last = read_topic(filled, name, partitions=[0])
    assert len(list(read_topic(filled, name))) == before + 2
    assert (last.offset, last.key) == (12, b"k")
    assert ids(laminar("topics", "find", "settled", "-o", "-1", "-p", "0", "-O", "jsonl", run=run_id)) == ["p18.0"]
    odd = next(record for record in read_topic(filled, name, partitions=[0]) if record.offset == 11)
    assert (odd.key, odd.headers) == (b"odd", (("mine", b"1"),))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("find", "settled", "-w", "outcom = 1"), "the nearest is outcome"),
        (("find", "settled", "--columns", "tokenz"), "the nearest is tokens"),
        (("find", "settled", "-o", "then"), "'then' is"),
        (("find", "settled", "-o", "csv"), "-o is the offset; for the output format give -O csv"),
        (("find", "setled"), "did you mean 'settled'?"),
        (("stats", "settled", "-p", "x"), "is not a list of partitions"),
        (("offsets", "settled", "--at", "then"), "'then' is"),
        (("dlq", "list", "-w", "wy = 1"), "there is no column wy"),
    ],
)
def test_wrong_use_exits_with_2(laminar: Laminar, words: tuple[str, ...], reason: str) -> None:
    code, _, err = laminar("topics", *words)
    assert code == 2
    assert reason in " ".join(err.replace("│", " ").split())


def test_find_joins_no_consumer_group(laminar: Laminar, filled: ClientProperties) -> None:
    laminar("topics", "find", "settled", "-n", "1")
    with admin_client(filled) as admin:
        assert list_groups(admin, run_prefix(RUN)) == []
