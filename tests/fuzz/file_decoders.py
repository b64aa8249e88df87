"""Decoders of files and logs that others may have written: prompts, model folders, a stopped broker's data, metrics.

Each takes bytes and raises only what its callers turn into a refusal; decoders.py lists them with their seeds.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from kafka.errors import CorruptRecordError
from kafka.record.default_records import DefaultRecordBatchBuilder
from prometheus_client import CollectorRegistry, generate_latest
from safetensors.numpy import save

from infra.kafka.record_batches import read_batch
from infra.kafka.stored.metadata import committed_offset, topic_settings
from infra.kafka.stored.partition import StoredPartition
from infra.kafka.transaction_log import parse_decision, transactional_id
from infra.models.sizes import context_length, parameter_count
from infra.store.weight_files import INDEX, tensor_places, weight_paths
from operators.agents.agent_process import read_report
from operators.prompts.arrow_rows import open_dataset, open_parquet
from operators.prompts.config import TaskConfig
from operators.prompts.jsonl_rows import JsonlRows
from operators.prompts.question import BadRow, SourceError
from operators.rollout.emulation_config import LengthsConfig
from operators.rollout.environments.calculator import Calculator
from operators.rollout.response_lengths import open_lengths
from operators.score.verifiers import texts
from pipelines.inspect.metrics_file import read_metrics
from pipelines.inspect.run_state.state import fold_all, new_run
from pipelines.present.view.exposition import RunCollector
from schemas.metric_labels import labelled, split_labels

MAX_ROWS = 64


@contextmanager
def written(data: bytes, name: str) -> Iterator[Path]:
    """A file `name` with `data` in a new folder in memory."""
    with TemporaryDirectory(prefix="fuzz-", dir="/dev/shm") as folder:
        file = Path(folder) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        yield file


def prompts(kind: str) -> Callable[[bytes], None]:
    """The questions of a file of prompts."""

    def run(data: bytes) -> None:
        with written(data, f"train.{kind}") as file:
            config = TaskConfig(source="dataset" if kind == "arrow" else kind, path=str(file), answer_required=True)
            if kind == "jsonl":
                rows: object = JsonlRows(file, config)
            else:
                rows = open_parquet(file, config) if kind == "parquet" else open_dataset(file.parent, config)
            for question in islice(rows.scan(), MAX_ROWS):  # type: ignore[attr-defined]
                if not isinstance(question, BadRow):
                    assert rows.question(question.index) == question  # type: ignore[attr-defined]
            rows.close()  # type: ignore[attr-defined]

    return run


def prompt_seeds(kind: str) -> Callable[[], list[bytes]]:
    """Files with two rows, in each layout."""

    def make() -> list[bytes]:
        rows = [{"question": "1 + 1", "answer": "2"}, {"question": "2 + 3", "answer": "5"}]
        messages = [{"prompt": [{"role": "user", "content": "a"}], "reward_model": {"ground_truth": "b"}}]
        if kind == "jsonl":
            return [b"\n".join(json.dumps(row).encode() for row in each) for each in (rows, messages)]
        made = []
        for each in (rows, messages):
            out, table = io.BytesIO(), pa.Table.from_pylist(each)
            if kind == "parquet":
                pq.write_table(table, out)
            else:
                with pa.ipc.new_stream(out, table.schema) as writer:
                    writer.write_table(table)
            made.append(out.getvalue())
        return made

    return make


def dataset_folder(data: bytes) -> None:
    """The first line is dataset_dict.json, the rest state.json."""
    splits, _, state = data.partition(b"\n")
    with written(splits, "dataset_dict.json") as file:
        (file.parent / "train").mkdir()
        (file.parent / "train" / "state.json").write_bytes(state)
        for row in open_dataset(file.parent, TaskConfig(source="dataset", path=str(file.parent))).scan():  # type: ignore[call-arg]
            assert row


def model_folder(data: bytes) -> None:
    """As the header of a file of weights, as their index, and as a configuration."""
    with suppress(ValueError):
        for place in tensor_places(memoryview(data)).values():
            assert 0 <= place.start <= place.end <= len(data)
    with written(data, "config.json") as file:
        (file.parent / INDEX).write_bytes(data)
        with suppress(ValueError):
            assert all(path.parent == file.parent for path in weight_paths(file.parent))
        with suppress(ValueError):
            context_length(file.parent)
        parameter_count(file.parent)


def model_seeds() -> list[bytes]:
    """Weights, an index and a configuration."""
    return [
        save({"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float16)}),
        b'{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}',
        b'{"max_position_embeddings": 64, "vocab_size": 9, "dtype": "bfloat16"}',
    ]


def stored_log(data: bytes) -> None:
    """A segment of a partition of a stopped broker, with the records in it."""
    with written(data, f"runs-0/{0:020}.log") as file:
        partition = StoredPartition(file.parent)
        partition.settle([1])
        for _, batch in partition.batches(0, committed=True):
            if batch is not None:
                read_batch(batch, 0, 0)
        partition.first_at(5)


def stored_seeds() -> list[bytes]:
    """A batch of two records, and the same within a transaction."""
    made = []
    for transactional in (False, True):
        builder = DefaultRecordBatchBuilder(2, 0, int(transactional), 7, 0, 0, 1 << 16)
        for offset in range(2):
            builder.append(offset, 5 + offset, b"key", b"value", [("header", b"1")])
        made.append(bytes(builder.build()))
    return made


def internal_records(data: bytes) -> None:
    """A record of one of Kafka's internal topics: its key up to the first NUL NUL, and its value."""
    key, _, value = data.partition(b"\0\0\0\0")
    for read in (
        lambda: parse_decision(data),
        lambda: transactional_id(data),
        lambda: topic_settings([data]),
        lambda: committed_offset(key, value),
    ):
        with suppress(ValueError, CorruptRecordError):
            read()


def internal_seeds() -> list[bytes]:
    """A decision of a transaction, a setting of a topic, and a committed offset."""
    decision = struct.pack(">hqhib", 0, 7, 0, 60_000, 2) + struct.pack(">ih4sii", 1, 4, b"runs", 1, 0) + bytes(16)
    setting = b"\x01\x04\x00\x02" + b"\x05runs\x0dretention.ms\x02\x39"
    offset = struct.pack(">hh1sh4si", 1, 1, b"g", 4, b"runs", 3)
    return [decision, setting, offset + bytes(4) + struct.pack(">hqhq", 3, 99, 0, 5)]


def metrics(data: bytes) -> None:
    """A file of metrics, as it is shown to Prometheus."""
    with written(data, "metrics.jsonl") as file:
        state = fold_all(new_run("a", 1, 0), read_metrics(file))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(lambda: state))
    generate_latest(registry)


def metric_seeds() -> list[bytes]:
    """Lines of a trainer and of the buffer, with labels."""
    names = {"reward/mean": 0.5, labelled("reward/mean", task='a"\\\n'): 1.0, "moved/repack": 2.0}
    lines = [
        {"name": name, "step": 3, "values": names, "measured_at": 1_700_000_000_000}
        for name in ("trainer", "experience", "steps/score", "evaluation")
    ]
    return [b"\n".join(json.dumps(line).encode() for line in lines)]


def metric_labels(data: bytes) -> None:
    """The name of a value: labels that were read are written and read as the same."""
    name, labels = split_labels(data.decode(errors="surrogateescape"))
    if labels:
        assert split_labels(labelled(name, **labels)) == (name, labels)


def response_lengths(data: bytes) -> None:
    """A file of lengths for emulated responses."""
    with written(data, "lengths.jsonl") as file:
        open_lengths(LengthsConfig(file=str(file)))(1, "p1.0")


def agent_report(data: bytes) -> None:
    """The file in which an agent reports."""
    with written(data, "report.json") as file:
        read_report(file)


def model_answers(data: bytes) -> None:
    """A model's text, as built-in rewards and the calculator read it."""
    text = data.decode(errors="replace")
    for verify in (texts.equals_text, texts.equals_number):
        assert verify(text, ["12"]) in (0.0, 1.0)
    tool = Calculator()
    tool.reset({"reference": {"answer": "12"}})
    tool.step(text)


ANSWER_SEEDS = [b"<calc>12*(7-2)**3//4</calc>", b"so # 12", b"1_000.5%", b"-3/4", b"<calc>2**64**2</calc>"]
REJECTED_PROMPTS = (SourceError,)
