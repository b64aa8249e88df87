"""Every decoder of bytes from outside a process, with its seeds and the exceptions by which it rejects input.

`check(data)` returns if the bytes are accepted or rejected; any other exception is a defect. Seeds are outputs of the
encoders, so that a fuzzer passes the first checks.
"""

from __future__ import annotations

import io
import json
import socket
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import file_decoders as files
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from kafka.errors import CorruptRecordError
from record_samples import SAMPLES, VERSION

from infra.conditions.tables import table_condition
from infra.json_text import decode_json
from infra.kafka.java_properties import parse_properties
from infra.kafka.note import Note
from infra.kafka.offset_span import parse_span
from infra.kafka.record_batches import unpack
from infra.models.conversations import ConversationFormat, TemplateError
from infra.store.deltas import apply_delta, encode_delta
from infra.store.errors import StoreError
from infra.store.incoming_version import read_seal
from infra.store.layout import Layout
from infra.transport.array_messages import receive_message
from infra.transport.chunked_blob import ChunkedBlob, delta_blob, full_blob
from infra.transport.encrypted_connection import EncryptedConnection
from infra.transport.frames import FrameKind, TransportError, receive, send_chunk
from infra.transport.kv_transfer import decode_parts, encode_parts
from infra.transport.serving import parse_request
from infra.transport.throttle import Link
from operators.export.folder import STATE, ExportError, read_contents, read_parts
from operators.export.formats import read_table
from operators.export.tickets import Ticket, parse_ticket
from operators.gateway.chat_api import parse_chat, parse_completion
from operators.gateway.conversation import RecordedConversations, plan_turn, response_digest
from operators.gateway.errors import ApiError
from operators.gateway.responses_api import parse_responses
from operators.gateway.tool_calls import parse_response
from operators.rollout.step_plan import Decode, plan_prefill
from pipelines.config import ConfigError, parse_config
from schemas import records as r
from schemas.block_codec import decode_all, decode_as_block
from schemas.codec import UndecodableRecord, decode, encode
from schemas.identity import parse_trajectory_id

ROOT = Path(__file__).parents[2]
DEEP = b"[" * 2_000
FROM = b'{"topic": "experiences", "from": {"0": 3}, "until": {"0": 9}}'
"""JSON nested too deeply for a recursive parser."""


@dataclass(frozen=True)
class Decoder:
    """A decoder of untrusted bytes, the exceptions by which it rejects them, and seeds."""

    name: str
    run: Callable[[bytes], object]
    rejections: tuple[type[Exception], ...]
    seeds: Callable[[], list[bytes]]

    def check(self, data: bytes) -> None:
        """Decode `data`; an exception is a defect."""
        with suppress(*self.rejections):
            self.run(data)


_ENCODED = {kind: encode(record) for kind, record in SAMPLES.items()}
_HEADERS = [headers for _, headers in _ENCODED.values()]


def _typed(data: bytes) -> tuple[bytes, tuple[tuple[str, bytes], ...]]:
    """The value, and the headers selected by the first byte."""
    return data[1:], _HEADERS[(data[0] if data else 0) % len(_HEADERS)]


def _record_seeds() -> list[bytes]:
    return [bytes([at]) + value for at, (value, _) in enumerate(_ENCODED.values())]


def _many(data: bytes) -> None:
    parts = [_typed(part) for part in data.split(b"\n--\n")[:8]]
    decode_all([value for value, _ in parts], [headers for _, headers in parts]).per_value()


def _kv(data: bytes) -> None:
    """A hand-over and its KV manifest, decoded as by the destination."""
    headers = _ENCODED[r.Assignment][1]
    for record in decode(data, headers):
        if isinstance(record, r.Assignment) and record.kv is not None:
            kv = record.kv
            blob = ChunkedBlob(kv.policy_version, "kv", kv.name, kv.bytes, kv.chunk_bytes, kv.chunk_checksums)
            for chunk in range(min(blob.chunks, 4)):
                blob.span(chunk)


def _frames(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        theirs.send(data[: 1 << 16] or b"\0")
        theirs.shutdown(socket.SHUT_WR)
        while True:
            frame = receive(ours)
            parse_request(frame.body)


def _segments(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs, EncryptedConnection(ours, bytes(32), bytes(32)) as connection:
        theirs.setblocking(False)
        theirs.send(data[: 1 << 16] or b"\0")
        theirs.shutdown(socket.SHUT_WR)
        memory = memoryview(bytearray(16))
        while connection.recv_into(memory):
            pass


def _segment_seeds() -> list[bytes]:
    ours, theirs = socket.socketpair()
    with theirs, EncryptedConnection(ours, bytes(32), bytes(32)) as connection:
        connection.sendall(b"a segment")
        connection.sendall(bytes(40))
        return [theirs.recv(1 << 16)]


def _stage_message(data: bytes) -> None:
    """The list of arrays up to the first line feed, and their bytes."""
    from operators.rollout.staged.stage import decode_plan  # imported here: it loads torch

    ours, theirs = socket.socketpair()
    listed, _, arrays = data[: 1 << 15].partition(b"\n")
    listed = listed or b" "  # a frame is never empty
    with ours, theirs:
        send_chunk(
            theirs, memoryview(listed + arrays), Link(), kind=FrameKind.ARRAYS, message="step", listed=len(listed)
        )
        message = receive_message(ours, Link(), 1 << 16)
    decode_plan(message.arrays, rows=8, context=16)


def _agent_request(data: bytes) -> None:
    """A body of each endpoint, with its digests and tokens."""
    try:
        body = decode_json(data)
    except ValueError:
        return
    for parse in (parse_chat, parse_completion, parse_responses):
        try:
            chat = parse(body)
            plan_turn(chat.messages, chat.tools, RecordedConversations(), _PLAIN)
        except (ApiError, TemplateError):
            continue
        json.dumps([chat.model, chat.turn(0, 0).tools], ensure_ascii=False).encode()


def _tool_calls(data: bytes) -> None:
    message = parse_response(data.decode(errors="replace"), _TOOLS, "t")
    response_digest("", {"role": "assistant", "content": message.content, "tool_calls": message.tool_calls})


class _Letters:
    """A tokenizer of characters."""

    eos_token_id, chat_template = 0, None

    def encode(self, text: str, **options: object) -> list[int]:
        return list(text.encode())


_PLAIN = ConversationFormat(_Letters(), plain=True)  # type: ignore[arg-type]
_TOOLS = [{"type": "function", "function": {"name": "add"}}]
_BODY = {"messages": [{"role": "user", "content": "a"}], "tools": _TOOLS, "stop": ["x"], "prompt": "a", "input": "b"}


def _history_seeds() -> list[bytes]:
    from pipelines.simulate.explore import draw_history, to_json

    return [json.dumps(to_json(draw_history(seed))).encode() for seed in range(3)]


def _history(data: bytes) -> None:
    from pipelines.simulate.explore import read_history  # imported here: it loads every role

    with _file(data, "history.json") as file:
        read_history(file)


def _manifest(data: bytes) -> None:
    for manifest in decode(data, _ENCODED[r.WeightVersion][1]):
        full_blob(manifest)
        delta_blob(manifest)
        if manifest.tensors:
            Layout(manifest.tensors)


_PARENT = np.arange(4096, dtype=np.uint16).view(np.uint8)


def _delta(data: bytes) -> None:
    apply_delta(memoryview(data), memoryview(_PARENT), memoryview(bytearray(len(_PARENT))), threads=1)


def _delta_seeds() -> list[bytes]:
    few, many = _PARENT.copy(), _PARENT[::-1].copy()
    few[::200] ^= 1
    spans = [(0, len(_PARENT), 2)]
    return [encode_delta(memoryview(_PARENT), memoryview(child), spans) for child in (few, many, _PARENT)]


def _configuration(data: bytes) -> None:
    parse_config(tomllib.loads(data.decode()), "fuzzed.toml")


def _ticket(data: bytes) -> None:
    ticket = parse_ticket(data)
    ticket.contents("run")
    assert parse_ticket(ticket.encode()) == ticket


_SCHEMA = pa.schema([("reward", pa.float64()), ("task", pa.utf8()), ("completion_tokens", pa.int64())])


@contextmanager
def _file(data: bytes, name: str) -> Iterator[Path]:
    with TemporaryDirectory(prefix="fuzz-", dir="/dev/shm") as folder:
        file = Path(folder) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        yield file


def _table(kind: str) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        with _file(data, "part") as file:
            read_table(file, kind, _SCHEMA).to_pylist()  # type: ignore[arg-type]

    return run


def _table_seeds(kind: str) -> Callable[[], list[bytes]]:
    rows = pa.table({"reward": [0.5, None], "task": ["gcd", "a"], "completion_tokens": [3, 4]}, schema=_SCHEMA)

    def make() -> list[bytes]:
        out = io.BytesIO()
        if kind == "parquet":
            pq.write_table(rows, out)
        elif kind == "arrow":
            with pa.ipc.new_file(out, rows.schema) as writer:
                writer.write_table(rows)
        else:
            out.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows.to_pylist()))
        return [out.getvalue()]

    return make


def _export_folder(data: bytes) -> None:
    """The first line is export.json, the second a part's manifest."""
    about, _, part = data.partition(b"\n")
    with _file(about, f"{STATE}/export.json") as file:
        (file.parent / "manifest-0.json").write_bytes(part)
        for read in (read_contents, read_parts):
            try:
                read(file.parent.parent)
            except ExportError:
                continue


def _seal(data: bytes) -> None:
    with _file(data, f"{VERSION}.json") as file:
        read_seal(file.parent, VERSION)


def _texts(data: bytes) -> None:
    text = data.decode(errors="surrogateescape")
    for parse in (parse_trajectory_id, r.PolicyVersion.parse, parse_properties):
        try:
            parse(text)
        except ValueError:
            continue
    parse_span([text], 1_700_000_000_000)


_KV_PARTS = bytes(encode_parts([r.KVManifest("h:1", "a", VERSION, 5, 9, 8, (3, 4))]))


def _stage_seeds() -> list[bytes]:
    from operators.rollout.staged.stage import encode_plan

    blocks = plan_prefill([np.array([1, 2, 3]), np.array([4, 5])], [3, 4], 64)
    arrays = encode_plan(Decode(np.array([6, 7]), np.array([4, 5]), 1), blocks)
    listed = json.dumps([["int64", array.shape] for array in arrays]).encode()
    return [listed + b"\n" + b"".join(array.tobytes() for array in arrays), b'[["uint8",[2,1]]]\nab']


_EXPORT = (
    b'{"run": "a", "topic": "experiences", "format": "parquet", "view": "full", "where": "", "starts": {"0": 0}}\n'
    b'{"partition": 0, "first": 0, "last": 4, "rows": 5, "file": "a", "bytes": 9, "sha256": "", "undecodable": [],'
    b' "replaces": []}'
)

DECODERS = {
    each.name: each
    for each in (
        Decoder("records", lambda data: decode(*_typed(data)), (UndecodableRecord,), _record_seeds),
        Decoder("blocks", lambda data: decode_as_block(*_typed(data)), (UndecodableRecord,), _record_seeds),
        Decoder("many records", _many, (), lambda: [*_record_seeds(), b"\n--\n".join(_record_seeds()[:4])]),
        Decoder(
            "record batches", lambda d: unpack(d, 2, 0, 0, {}), (CorruptRecordError,), lambda: [b"\x14\0\0\0\2a\4bc\0"]
        ),
        Decoder("hand-overs and KV", _kv, (UndecodableRecord, ValueError), lambda: [_ENCODED[r.Assignment][0]]),
        Decoder("relay frames", _frames, (TransportError,), lambda: [b"LMN1\5\0\0\0\2" + bytes(8) + b"{}"]),
        Decoder("relay segments", _segments, (TransportError,), _segment_seeds),
        Decoder("KV parts", lambda d: decode_parts(memoryview(d)), (TransportError,), lambda: [_KV_PARTS, DEEP]),
        Decoder("stage messages", _stage_message, (TransportError,), _stage_seeds),
        Decoder("agents' requests", _agent_request, (), lambda: [json.dumps(_BODY).encode(), DEEP]),
        Decoder(
            "tool calls",
            _tool_calls,
            (),
            lambda: [
                b'a<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
                b'[TOOL_CALLS][{"name": "add", "arguments": "{}"}]',
                b'<|python_tag|>{"name": "add", "parameters": {}}',
            ],
        ),
        Decoder("files of histories", _history, (ValueError,), _history_seeds),
        Decoder("manifests", _manifest, (UndecodableRecord, ValueError), lambda: [_ENCODED[r.WeightVersion][0], DEEP]),
        Decoder("deltas", _delta, (ValueError,), _delta_seeds),
        Decoder("seals", _seal, (StoreError,), lambda: [b'{"version": "2.17", "bytes": 5, "blake3": "b"}', DEEP]),
        Decoder(
            "Flight tickets",
            _ticket,
            (ValueError,),
            lambda: [Ticket("experiences", "reward > 0.5").encode(), FROM, DEEP],
        ),
        Decoder(
            "conditions",
            lambda d: table_condition(d.decode(), _SCHEMA),
            (ValueError,),
            lambda: [b"reward > 1 and task in ('a')"],
        ),
        Decoder(
            "configuration",
            _configuration,
            (ConfigError, ValueError),
            lambda: [(ROOT / "examples/gcd.toml").read_bytes()],
        ),
        Decoder("imported Parquet", _table("parquet"), (ValueError,), _table_seeds("parquet")),
        Decoder("imported Arrow", _table("arrow"), (ValueError,), _table_seeds("arrow")),
        Decoder("imported JSON lines", _table("jsonl"), (ValueError,), _table_seeds("jsonl")),
        Decoder("exports' manifests", _export_folder, (), lambda: [b"{}\n{}", DEEP]),
        Decoder(
            "notes",
            lambda d: Note.decode(d.decode()),
            (ValueError,),
            lambda: [Note(1, {"a": 2}).encode().encode(), DEEP],
        ),
        *(
            Decoder(f"prompts of {kind}", files.prompts(kind), files.REJECTED_PROMPTS, files.prompt_seeds(kind))
            for kind in ("jsonl", "parquet", "arrow")
        ),
        Decoder(
            "datasets' folders",
            files.dataset_folder,
            files.REJECTED_PROMPTS,
            lambda: [b'{"splits": ["train"]}\n{"_data_files": [{"filename": "a.arrow"}]}', DEEP + b"\n" + DEEP],
        ),
        Decoder("model folders", files.model_folder, (), lambda: [*files.model_seeds(), DEEP]),
        Decoder("stored logs", files.stored_log, (CorruptRecordError,), files.stored_seeds),
        Decoder("Kafka's internal records", files.internal_records, (), files.internal_seeds),
        Decoder("metrics", files.metrics, (ValueError,), lambda: [*files.metric_seeds(), DEEP]),
        Decoder("metric labels", files.metric_labels, (), lambda: [b'reward/mean{task="a\\"",x="b"}', b"drawn/a"]),
        Decoder("response lengths", files.response_lengths, (ValueError,), lambda: [b'{"length": 5}\n', DEEP]),
        Decoder("agents' reports", files.agent_report, (ValueError,), lambda: [b'{"reward": 1, "answer": "a"}', DEEP]),
        Decoder("model answers", files.model_answers, (), lambda: files.ANSWER_SEEDS),
        Decoder("identities and offsets", _texts, (ValueError,), lambda: [b"p12.3", b"2.17", b"s@2026-01-01", b"-100"]),
    )
}
