"""The files that a run has in Kafka for hosts that join it, on the topic `run-files`: settings, and no weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from blake3 import blake3

from infra.clocks import wall_ms
from infra.kafka.producer import BoundedProducer
from infra.kafka.properties import ClientProperties
from infra.kafka.topic_reader import read_rows
from infra.sizes import size_text
from schemas.codec import encode
from schemas.records import PART_BYTES, RunFilePart, RunFiles
from schemas.topics import ALL_FILES, RUN_FILES

MAX_FILE_BYTES = 64 << 20
MAX_ALL_BYTES = 96 << 20
MAX_FILES = 32
DELIVER_S = 60.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_CHECKSUM = re.compile(r"[0-9a-f]{64}")


class InvalidRunFiles(ValueError):
    """Files that the topic cannot hold, or that a valid writer never writes there: names, sizes, checksums."""


def write_run_files(client: ClientProperties, run: str, files: Mapping[str, bytes]) -> bool:
    """Write `files`, all of those of `run`, unless the topic has just these; returns whether it wrote.

    Raises InvalidRunFiles, UnknownTopic, DeliveryFailed, TimeoutError.
    """
    checksums = {name: blake3(data).hexdigest() for name, data in files.items()}
    sizes = tuple(len(data) for data in files.values())
    listed = RunFiles(tuple(files), sizes, tuple(checksums.values()), wall_ms())
    _check(listed)
    try:
        if read_run_files(client, run) == dict(files):
            return False
    except InvalidRunFiles:
        pass  # another program wrote there: it is replaced
    topic = RUN_FILES.name(run)
    with BoundedProducer(client) as producer:

        def send(record: RunFilePart | RunFiles, key: str) -> None:
            value, headers = encode(record)
            producer.send(topic, value, key=key.encode(), headers=headers, partition=0)

        for name, data in files.items():
            for part in range(_parts(len(data))):
                piece = data[part * PART_BYTES : (part + 1) * PART_BYTES]
                send(RunFilePart(name, part, checksums[name], piece), f"{name}/{part}")
        producer.flush(DELIVER_S)
        send(listed, ALL_FILES)
        producer.flush(DELIVER_S)
    return True


def read_run_files(
    client: ClientProperties, run: str, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, bytes] | None:
    """The files of `run` with `wanted` names; None if none are written yet, or others are being written.

    Memory is bounded by MAX_ALL_BYTES. Raises InvalidRunFiles, UnknownTopic.
    """
    topic, listed = RUN_FILES.name(run), None
    for listed in read_rows(client, topic, RunFiles):  # noqa: B007 - the last one is valid
        pass
    if listed is None:
        return None
    _check(listed)
    files = zip(listed.names, listed.sizes, listed.checksums, strict=True)
    expected = {name: (size, checksum) for name, size, checksum in files if wanted(name)}
    pieces: dict[str, dict[int, bytes]] = {name: {} for name in expected}
    for part in read_rows(client, topic, RunFilePart):
        if part.name not in expected:
            continue
        size, checksum = expected[part.name]
        length = min(PART_BYTES, size - part.part * PART_BYTES)
        if part.checksum == checksum and part.part >= 0 and len(part.data) == length:
            pieces[part.name][part.part] = part.data
    found: dict[str, bytes] = {}
    for name, (size, checksum) in expected.items():
        if len(pieces[name]) < _parts(size):
            return None
        found[name] = b"".join(data for _, data in sorted(pieces[name].items()))
        if blake3(found[name]).hexdigest() != checksum:
            raise InvalidRunFiles(f"{name} in {topic} differs from its checksum: start the trainer again, to write it")
    return found


def _parts(size: int) -> int:
    return -(-size // PART_BYTES)


def _check(listed: RunFiles) -> None:
    names, sizes, checksums = listed.names, listed.sizes, listed.checksums
    if not len(names) == len(sizes) == len(checksums) == len(set(names)) <= MAX_FILES:
        raise InvalidRunFiles(f"the list of files is invalid: {len(names)} names, at most {MAX_FILES} different ones")
    for name, size, checksum in zip(names, sizes, checksums, strict=True):
        if _NAME.fullmatch(name) is None:
            raise InvalidRunFiles(f"{name[:100]!r} is not the name of a file in a folder")
        if not 0 <= size <= MAX_FILE_BYTES or _CHECKSUM.fullmatch(checksum) is None:
            raise InvalidRunFiles(f"{name} has {size} bytes, at most {MAX_FILE_BYTES}, or an invalid checksum")
    if (total := sum(sizes)) > MAX_ALL_BYTES:
        raise InvalidRunFiles(f"the files have {size_text(total)} together, at most {size_text(MAX_ALL_BYTES)}")
