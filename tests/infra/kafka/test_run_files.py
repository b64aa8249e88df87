"""The files of a run on the topic `run-files`: written when they changed, bounded and verified when they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from blake3 import blake3

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.producer import BoundedProducer
from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import UnknownTopic
from infra.kafka.run_files import MAX_ALL_BYTES, MAX_FILE_BYTES, InvalidRunFiles, read_run_files, write_run_files
from schemas.codec import encode
from schemas.records import PART_BYTES, RunFilePart, RunFiles
from schemas.topics import RUN_FILES

TOKENIZER = bytes(range(256)) * (PART_BYTES // 256) + b"end"
FILES = {"config.toml": b"[run]\n", "tokenizer.json": TOKENIZER, "empty.txt": b""}
SUMS = {name: blake3(data).hexdigest() for name, data in FILES.items()}
Send = Callable[..., None]


@pytest.fixture
def client(broker: Broker, run_id: str) -> ClientProperties:
    client = ClientProperties.at(broker.bootstrap_servers)
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(RUN_FILES.name(run_id), 1)])
    return client


@pytest.fixture
def send(client: ClientProperties, run_id: str) -> Send:
    """Write records as any program that may write the topic."""

    def call(*records: Any) -> None:
        with BoundedProducer(client) as producer:
            for record in records:
                value, headers = encode(record)
                producer.send(RUN_FILES.name(run_id), value, key=b"x", headers=headers, partition=0)

    return call


def listed(files: dict[str, bytes], **sizes: int) -> RunFiles:
    all_sizes = tuple(sizes.get(name, len(data)) for name, data in files.items())
    return RunFiles(tuple(files), all_sizes, tuple(blake3(data).hexdigest() for data in files.values()), 1)


def test_run_files_are_read_back_and_written_only_if_changed(client: ClientProperties, run_id: str) -> None:
    assert read_run_files(client, run_id) is None
    assert write_run_files(client, run_id, FILES)
    assert not write_run_files(client, run_id, FILES)
    assert read_run_files(client, run_id) == FILES
    assert read_run_files(client, run_id, lambda name: name == "config.toml") == {"config.toml": FILES["config.toml"]}
    changed = {"config.toml": b"[run]\nname = 'a'\n"}
    assert write_run_files(client, run_id, changed)
    assert read_run_files(client, run_id) == changed


def test_run_files_with_a_missing_part_are_not_read(client: ClientProperties, run_id: str, send: Send) -> None:
    first, last = (RunFilePart("tokenizer.json", at, SUMS["tokenizer.json"], b"") for at in range(2))
    send(first, last, RunFilePart("tokenizer.json", 9, SUMS["tokenizer.json"], b""), listed(FILES))
    assert read_run_files(client, run_id) is None
    assert write_run_files(client, run_id, FILES)
    assert read_run_files(client, run_id) == FILES


def test_foreign_parts_do_not_replace_those_of_run_files(client: ClientProperties, run_id: str, send: Send) -> None:
    write_run_files(client, run_id, FILES)
    send(RunFilePart("other", 0, "", b""), RunFilePart("config.toml", 0, "ab" * 32, b"[rum]\n"))
    send(RunFilePart("config.toml", -1, SUMS["config.toml"], b"[run]\n"))
    assert read_run_files(client, run_id) == FILES
    send(RunFilePart("config.toml", 0, SUMS["config.toml"], b"[rum]\n"))
    with pytest.raises(InvalidRunFiles, match=r"config\.toml in .* differs from its checksum"):
        read_run_files(client, run_id)
    assert write_run_files(client, run_id, FILES)


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (listed({"../config.toml": b""}), "not the name of a file"),
        (listed({".hidden": b""}), "not the name of a file"),
        (listed({"config.toml": b""}, **{"config.toml": MAX_FILE_BYTES + 1}), "bytes, at most"),
        (listed({"config.toml": b""}, **{"config.toml": -1}), "bytes, at most"),
        (listed({"a": b"", "b": b""}, a=MAX_FILE_BYTES, b=MAX_ALL_BYTES - MAX_FILE_BYTES + 1), "together"),
        (listed({f"f{number}": b"" for number in range(33)}), "33 names"),
        (RunFiles(("a", "a"), (0, 0), ("ab" * 32,) * 2, 1), "2 names"),
        (RunFiles(("a",), (0,), ("zz",), 1), "invalid checksum"),
    ],
)
def test_lists_beyond_the_bounds_are_rejected(
    client: ClientProperties, run_id: str, send: Send, record: RunFiles, problem: str
) -> None:
    send(record)
    with pytest.raises(InvalidRunFiles, match=problem):
        read_run_files(client, run_id)


def test_files_beyond_the_bounds_are_not_written(client: ClientProperties, run_id: str) -> None:
    with pytest.raises(InvalidRunFiles, match="not the name of a file"):
        write_run_files(client, run_id, {"folder/config.toml": b""})
    assert read_run_files(client, run_id) is None


def test_run_without_the_topic_of_files_is_told(broker: Broker, run_id: str) -> None:
    with pytest.raises(UnknownTopic):
        read_run_files(ClientProperties.at(broker.bootstrap_servers), run_id)
