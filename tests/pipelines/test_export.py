"""`laminar export` on a real broker: what committed transactions hold, once, whatever else is in the topic."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from kafka import KafkaProducer

from infra.kafka.admin import TopicSpec, admin_client, create_topics, delete_topics
from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from pipelines.cli.main import main
from schemas import records as r
from schemas.codec import encode
from schemas.columns import flags, floats, token_ids
from schemas.records import Metric
from schemas.topics import EXPERIENCES, METRICS, RESTORE

Laminar = Callable[..., tuple[int, str, str]]


def experience(number: int, member: int, reward: float) -> r.Experience:
    version = r.PolicyVersion(1, number)
    asked = r.Prompt(number, "train", "sums", "1 + 1", token_ids([1, 2]), "{}", 2, r.Sampling(1.0, 1.0, 0, 8, (), 0))
    response = r.Response(token_ids([5, 6]), floats([-0.5, -0.5]), flags([True, True]))
    spans = (r.VersionSpan(version, 2),)
    made = r.Trajectory(asked, member, 1, 1, 0, 1, response, "2", spans, version, "stop", None, 0, None, 0)
    return r.Experience(made, reward, (), None, 0)


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
        """Groups of two in one record each, on both partitions in turn."""
        self._producer.begin_transaction()
        for number in numbers:
            value, headers = encode(experience(number, 0, 1.0), experience(number, 1, 0.0))
            self._send(value, headers, number % 2)
        (self._producer.commit_transaction if commit else self._producer.abort_transaction)()

    def write_garbage(self) -> None:
        """No schema, an unknown version, a record of another topic, and bytes that are cut."""
        value, headers = encode(experience(0, 0, 1.0))
        other, its = encode(Metric("a", 1, {}, 0))
        self._producer.begin_transaction()
        self._send(b"\xff", (), 0)
        self._send(value, (("laminar-schema", b"Experience/99"),), 0)
        self._send(other, its, 0)
        self._send(value[:50], headers, 0)
        self._producer.commit_transaction()

    def write_metrics(self, steps: range) -> None:
        self._producer.begin_transaction()
        for step in steps:
            value, headers = encode(Metric("trainer", step, {"loss": step / 2}, step))
            self._producer.send(METRICS.name(self.run), value, b"k", list(headers), 0)
        self._producer.commit_transaction()

    def close(self) -> None:
        self._producer.close()

    def _send(self, value: bytes, headers: object, partition: int) -> None:
        self._producer.send(EXPERIENCES.name(self.run), value, b"p", list(headers), partition)  # type: ignore[call-overload]


@pytest.fixture
def topics(broker: Broker, run_id: str) -> Iterator[Topics]:
    made = Topics(broker, run_id)
    yield made
    made.close()


@pytest.fixture
def laminar(broker: Broker, capsys: pytest.CaptureFixture[str]) -> Laminar:
    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*words, "-b", broker.bootstrap_servers])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return call


def test_committed_rows_are_exported_once_and_the_next_export_goes_on(
    topics: Topics, laminar: Laminar, tmp_path: Path
) -> None:
    folder = str(tmp_path / "full")
    topics.write(range(6))
    topics.write(range(100, 104), commit=False)
    topics.write_garbage()
    code, out, err = laminar("export", "experiences", folder, "--run", topics.run, "--json")
    assert code == 0, err
    first = json.loads(out)
    assert (first["rows"], first["undecodable"]) == (12, 4)
    topics.write(range(6, 8))
    assert json.loads(laminar("export", "experiences", folder, "--run", topics.run, "--json")[1])["rows"] == 16
    table = pq.read_table(tmp_path / "full" / "data")
    assert sorted(table["trajectory_id"].to_pylist()) == sorted(f"p{n}.{m}" for n in range(8) for m in (0, 1))
    proof = json.loads(laminar("export", "verify", folder, "--log", "--json")[1])
    assert proof["problems"] == []
    assert proof["compared_with_log"]
    reasons = json.dumps([json.loads(p.read_text()) for p in (tmp_path / "full" / "_laminar").glob("manifest-*")])
    for reason in ("no laminar-schema header", "unknown schema", "does not travel as columns", "not a valid Arrow"):
        assert reason in reasons
    assert "16 rows" in (tmp_path / "full" / "README.md").read_text()

    _remove_a_row(tmp_path / "full")
    code, out, _ = laminar("export", "verify", folder, "--log")
    assert code == 1
    assert "rows that it lacks" in out


def _remove_a_row(folder: Path) -> None:
    """As an export would have it that had lost one, and knew nothing of it."""
    from operators.export.formats import sha256

    manifest = min((folder / "_laminar").glob("manifest-*"))
    said = json.loads(manifest.read_text())
    file = folder / "data" / said["file"]
    table = pq.read_table(file)
    pq.write_table(table.slice(1), file)
    said |= {"rows": len(table) - 1, "bytes": file.stat().st_size, "sha256": sha256(file)}
    manifest.write_text(json.dumps(said))


def test_conditions_views_and_starts(topics: Topics, laminar: Laminar, tmp_path: Path) -> None:
    topics.write(range(6))
    where = ("--where", "reward > 0.5", "--since-version", "2", "--since-offset", "1", "--view", "trl")
    code, out, err = laminar(
        "export", "experiences", str(tmp_path), "--run", topics.run, *where, "--format", "jsonl", "--json"
    )
    assert code == 0, err
    lines = [json.loads(line) for file in (tmp_path / "data").iterdir() for line in file.read_text().splitlines()]
    assert sorted(line["trajectory_id"] for line in lines) == ["p2.0", "p3.0", "p4.0", "p5.0"]
    assert lines[0]["prompt"] == "1 + 1"
    assert json.loads(out)["offsets"] == {"0": [1, 4], "1": [1, 4]}
    assert laminar("export", "verify", str(tmp_path), "--log")[0] == 0


def test_small_records_in_json_are_exported_too(topics: Topics, laminar: Laminar, tmp_path: Path) -> None:
    topics.write_metrics(range(5))
    assert laminar("export", "metrics", str(tmp_path), "--run", topics.run, "--format", "arrow")[0] == 0
    assert laminar("export", "verify", str(tmp_path), "--log")[0] == 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("nonsense", "d"), "is no topic"),
        (("experiences", "d", "--where", "rewrad > 1"), "the nearest is reward"),
        (("metrics", "d", "--view", "sft"), "the view sft is of experiences"),
        (("experiences", "d", "--since-time", "then"), "is no time"),
        (("experiences",), "Missing argument"),
    ],
)
def test_wrong_use_exits_with_2_and_makes_no_folder(
    laminar: Laminar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = laminar("export", *words, "--run", "a")
    assert code == 2
    assert reason in " ".join(err.replace("│", " ").split())
    assert not list(tmp_path.iterdir())


def test_what_the_topic_no_longer_has_is_told(topics: Topics, laminar: Laminar, tmp_path: Path) -> None:
    topics.write(range(4))
    words = ("export", "experiences", str(tmp_path), "--run", topics.run)
    assert laminar(*words)[0] == 0
    with admin_client(topics.client) as admin:
        delete_topics(admin, EXPERIENCES.name(topics.run))
        create_topics(admin, [TopicSpec(EXPERIENCES.name(topics.run), 2)])
    code, _, err = laminar(*words)
    assert code == 1
    assert "made anew, or is another Kafka's" in err
    assert len(err.strip().splitlines()[-1].split("\n")) == 1
