"""`laminar topics` and `laminar weights` against a real broker: their text and JSON output."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from kafka import KafkaConsumer, KafkaProducer, OffsetAndMetadata, TopicPartition

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from pipelines.cli.main import main
from schemas.codec import encode
from schemas.records import PolicyVersion, Settled, TensorSpec, WeightVersion
from schemas.release import RELEASE
from schemas.topics import RELAY, SETTLED, group_name

RUN = "topic-commands"
SETTLED_SAMPLE = Settled(
    trajectory_id="p0.0",
    group_size=1,
    outcome="batched",
    reason="",
    batch=1,
    staleness=0,
    tokens=9,
    settled_at=1_700_000_000_000,
)
Laminar = Callable[..., tuple[int, str, str]]


def manifest(epoch: int, number: int, parent: tuple[int, int] | None) -> WeightVersion:
    return WeightVersion(
        version=PolicyVersion(epoch, number),
        parent=PolicyVersion(*parent) if parent else None,
        step=number,
        file=f"{epoch}.{number}.safetensors",
        bytes=4096,
        blake3="ab" * 32,
        tensors=(TensorSpec("embed", "F32", (8, 16)),),
        batches=(number,),
        batch_offsets=(number,),
        trajectories_trained=8 * number,
        final=False,
        created_at=1_700_000_000_000,
    )


@pytest.fixture(scope="module")
def filled(broker: Broker) -> Broker:
    """A run with twelve settled trajectories, one undecodable record, and versions, of which 1.2 is no ancestor."""
    client = ClientProperties.at(broker.bootstrap_servers)
    settled, relay = SETTLED.name(RUN), RELAY.name(RUN)
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(settled, 2), TopicSpec(relay, 1, config={"cleanup.policy": "compact"})])
        producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers)
        for number in range(12):
            value, headers = encode(replace(SETTLED_SAMPLE, trajectory_id=f"p{number}.0"))
            producer.send(settled, value, key=b"k", headers=list(headers), partition=number % 2)
        producer.send(settled, b"\xff", partition=0)
        line = (manifest(1, 0, None), manifest(1, 1, (1, 0)), manifest(1, 2, (1, 1)), manifest(2, 2, (1, 1)))
        for version in line:
            value, headers = encode(version)
            producer.send(relay, value, key=str(version.version).encode(), headers=list(headers), partition=0)
        producer.flush()
        producer.close()
    consumer = KafkaConsumer(
        bootstrap_servers=broker.bootstrap_servers, group_id=group_name(RUN, "placement"), enable_auto_commit=False
    )
    consumer.commit({TopicPartition(settled, 1): OffsetAndMetadata(2, "", -1)})
    consumer.close()
    return broker


@pytest.fixture
def laminar(filled: Broker, command: Laminar) -> Laminar:
    """Call a command on the run; return exit code, stdout and stderr."""

    return lambda *words: command(*words, "--run", RUN, "-b", filled.bootstrap_servers)


def test_topics_list(laminar: Laminar) -> None:
    code, out, _ = laminar("topics", "list", "--json")
    rows = {row["topic"]: row for row in json.loads(out)}
    assert code == 0
    assert rows[SETTLED.name(RUN)]["partitions"] == 2
    assert rows[SETTLED.name(RUN)]["offsets"] == 13
    assert rows[SETTLED.name(RUN)]["record_types"] == "Settled"
    assert rows[RELAY.name(RUN)]["cleanup"] == "compact"
    table = laminar("topics", "list")[1]
    assert SETTLED.name(RUN) in table
    assert "RECORD-TYPES" in table


def test_topics_describe(laminar: Laminar) -> None:
    described = json.loads(laminar("topics", "describe", "settled", "--json")[1])
    assert described["partitions"][0] == {"partition": 0, "beginning": 0, "end": 7}
    assert described["records"] == ["Settled"]
    assert "partition 1: 0 to 6" in laminar("topics", "describe", SETTLED.name(RUN))[1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), 10),
        (("-n", "3"), 3),
        (("-n", "0"), 0),
        (("-n", "100"), 13),
        (("-o", "beginning"), 13),
        (("-o", "end"), 0),
        (("-o", "5"), 3),
        (("-o", "-2"), 4),
        (("-o", "-2", "-p", "1"), 2),
        (("-o", "beginning", "-n", "5"), 5),
        (("--follow", "-o", "beginning", "-n", "5"), 5),
    ],
)
def test_tail_prints_requested_number_of_records(laminar: Laminar, words: tuple[str, ...], expected: int) -> None:
    code, out, _ = laminar("topics", "tail", "settled", *words, "-O", "jsonl")
    assert code == 0
    assert len(out.splitlines()) == expected


def test_tail_shows_rows_and_undecodable_records(laminar: Laminar) -> None:
    words = ("topics", "tail", "settled", "-o", "0", "-p", "0")
    rows = json.loads(laminar(*words, "--json")[1])
    assert rows == [json.loads(line) for line in laminar(*words, "-O", "jsonl")[1].splitlines()]
    assert rows[0]["rows"][0]["trajectory_id"] == "p0.0"
    assert rows[0]["headers"]["laminar-schema"] == "Settled/2"
    assert rows[-1]["error"] == "no laminar-schema header"
    lines = laminar(*words)[1].splitlines()
    assert "Settled/2 k [p0.0, staleness 0, tokens 9] {" in lines[0]
    assert 'trajectory_id="p0.0"' in lines[0]
    assert "UNDECODABLE" in lines[-1]


def test_topics_lag(laminar: Laminar) -> None:
    (row,) = json.loads(laminar("topics", "lag", "--json")[1])
    assert row == {
        "group": group_name(RUN, "placement"),
        "topic": SETTLED.name(RUN),
        "partition": 1,
        "current_offset": 2,
        "log_end_offset": 6,
        "lag": 4,
        "beyond_goal": 0,
    }
    assert "LOG-END-OFFSET" in laminar("topics", "lag")[1]


def test_weights_list_marks_ancestors_of_newest(laminar: Laminar) -> None:
    rows = json.loads(laminar("weights", "list", "--json")[1])
    assert [(row["version"], row["ancestor"]) for row in rows] == [
        ("1.0", True),
        ("1.1", True),
        ("1.2", False),
        ("2.2", True),
    ]
    assert "1.2" in laminar("weights", "list")[1]
    code, text, note = laminar("weights", "list", "-n", "2", "--json")
    assert (code, [row["version"] for row in json.loads(text)]) == (0, ["1.2", "2.2"])
    assert note == "2 older versions are not shown: -n 0 shows all\n"


def test_weights_show(laminar: Laminar) -> None:
    assert json.loads(laminar("weights", "show", "--json")[1])["version"] == "2.2"
    assert "F32   [8, 16]              embed" in laminar("weights", "show", "1.1")[1]
    code, _, err = laminar("weights", "show", "7.7")
    assert (code, err) == (1, f"laminar: run {RUN} has no version 7.7; its versions: 1.0 to 2.2\n")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("topics", "tail", "nonsense"), "is not a topic"),
        (("topics", "tail", "settled", "-o", "then"), "'then' is"),
        (("topics", "tail", "settled", "-p", "a"), "is not a list of partitions"),
        (("topics", "tail"), "Missing argument"),
        (("topics", "wag"), "No such command"),
        (("weights", "show", "newest"), "not a policy version"),
    ],
)
def test_wrong_use_exits_with_2(laminar: Laminar, words: tuple[str, ...], reason: str) -> None:
    code, out, err = laminar(*words)
    assert code == 2
    assert not out
    assert reason in " ".join(err.replace("│", " ").split())


def test_tail_of_missing_topic_prints_one_line(laminar: Laminar) -> None:
    code, _, err = laminar("topics", "tail", "prompts")
    assert code == 1
    assert err.splitlines() == [f"laminar: there is no topic {RELAY.name(RUN).replace('relay', 'prompts')}"]
    code, _, err = laminar("topics", "tail", "settled", "-p", "5")
    assert code == 1
    assert "partitions 0 to 1" in err


def test_unreachable_broker_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from infra.kafka.readiness import BrokerUnreachable

    words = ["topics", "list", "-b", "127.0.0.1:1", "--run", "a"]
    with pytest.raises(SystemExit, match="1"):
        main(words)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "127.0.0.1:1" in lines[0]
    with pytest.raises(BrokerUnreachable):
        main([*words, "--debug"])


HEAVY = {"apache_beam", "torch", "transformers", "datasets", "pandas", "numpy", "psutil"}
HEAVY_OR_ARROW = HEAVY | {"pyarrow", "operators"}
METADATA = (
    "topics list",
    "topics describe settled",
    "topics lag",
    "topics offsets settled",
)
READERS = (
    "topics tail settled",
    "topics get settled 0:0",
    "topics find settled",
    "topics stats settled",
    "topics replay settled -o 0",
    "topics reset placement settled --to beginning",
    "topics dlq list",
    "trajectory p0.0",
    "lineage latest",
)
CONTROL_RECORDS = (
    "weights list",
    "weights show",
    "plans",
    "relays",
    "replicas",
    "watch --plain",
    "metrics serve",
)


@pytest.mark.parametrize(
    ("commands", "without", "expected"),
    [
        (METADATA, HEAVY_OR_ARROW, SETTLED.name(RUN)),
        (READERS, HEAVY, "p0.0"),
        (CONTROL_RECORDS, HEAVY | {"pyarrow"}, "1.2"),
    ],
)
def test_read_only_commands_import_no_heavy_package(
    filled: Broker, commands: tuple[str, ...], without: set[str], expected: str
) -> None:
    """The imports dominate the time to the first line of output. The run need not have all topics.

    The first command must succeed: an error caused by a blocked package appears at its first use.
    """
    code = (
        "import sys\nfrom pipelines.cli.main import main\n"
        f"for words in {commands!r}:\n"
        f"    sys.argv = ['laminar', *words.split(), '--run', {RUN!r}, '-b', {filled.bootstrap_servers!r}]\n"
        "    try:\n        main()\n"
        "    except SystemExit as ended:\n        code = ended.code or 0\n"
        f"    assert code <= (words != {commands[0]!r}), words\n"
        f"    loaded = {{name for name in {without!r} if sys.modules.get(name)}}\n"
        "    assert not loaded, (words, loaded)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_connect_defaults_to_latest_run(
    filled: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["topics", "list"])
    assert "there is no run" in " ".join(capsys.readouterr().err.replace("│", " ").split())
    state = tmp_path / "runs" / "latest" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text(
        json.dumps({"release": RELEASE, "run": RUN, "bootstrap_servers": filled.bootstrap_servers, "more": 1})
    )
    with pytest.raises(SystemExit, match="0"):
        main(["topics", "list"])
    assert SETTLED.name(RUN) in capsys.readouterr().out
    state.write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        main(["topics", "list"])


def test_command_config_reads_client_properties(
    filled: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "client.properties"
    file.write_text(f"bootstrap.servers={filled.bootstrap_servers}\nclient.id=me\n")
    with pytest.raises(SystemExit, match="0"):
        main(["weights", "show", "--run", RUN, "--command-config", str(file)])
    assert "2.2" in capsys.readouterr().out
    file.write_text("client.idd=me\n")
    with pytest.raises(SystemExit, match="1"):
        main(["weights", "show", "--run", RUN, "-F", str(file), "-b", filled.bootstrap_servers])
    assert "did you mean 'client.id'?" in capsys.readouterr().err
