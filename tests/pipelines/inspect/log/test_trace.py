"""`laminar trace`: the events for Perfetto, and the trace context of records."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from record_samples import SAMPLES

from operators.io.coalesce import coalesce
from operators.io.elements import Output
from pipelines.inspect.log.trace import metric_events, trajectory_events
from schemas import records as r
from schemas.block import Block
from schemas.codec import decode
from schemas.topics import BATCHES, EXPERIENCES, INBOX, METRICS, PROGRESS, SETTLED, TRAJECTORIES
from schemas.tracing import trace_id

RUN = "example-run"


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(1000 + seconds, UTC)


def test_trace_file_has_spans_of_every_trajectory(laminar: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    code, out, _ = laminar("trace", "--out", str(file), "--json")
    events = json.loads(file.read_text())["traceEvents"]
    assert (code, json.loads(out)["events"]) == (0, len(events))
    begins = {event["id"] for event in events if event["ph"] == "b" and event["pid"] == 1001}
    assert begins == {"p3.0", "p3.1"}
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} >= {"replica 1", "trainer", "score"}
    assert [event["name"] for event in events if event["ph"] == "i" and event["pid"] == 2] == [
        "version 1.0",
        "version 1.1",
        "version 1.2",
        "version 2.2",
    ]
    spans = [event for event in events if event["ph"] == "b" and event.get("args", {}).get("traceparent")]
    assert {event["args"]["traceparent"] for event in spans if event["id"].startswith("p3.")} == {trace_id(RUN, "p3")}


def test_trace_leaves_the_file_as_it_was_when_it_fails(
    laminar: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "trace.json"
    file.write_text("earlier")

    def failing(*_: object) -> Iterator[dict[str, object]]:
        yield {"ph": "M"}
        raise RuntimeError("Kafka went away")

    monkeypatch.setattr("pipelines.cli.trace.events", failing)
    code, _, error = laminar("trace", "--out", str(file))
    assert (code, error) == (1, "laminar: Kafka went away\n")
    assert file.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [file]


def test_trace_events_of_a_trajectory_and_a_step() -> None:
    row = {
        "trajectory_id": "p1.0",
        "group_id": "p1",
        "replica": 4,
        "policy_version": 2,
        "staleness": 0,
        "completion_tokens": 9,
        "lease": 1,
        "finish_reason": "stop",
        "token_sampler": "vllm",
        "started_at": at(0),
        "first_token_at": at(0.5),
        "finished_at": at(2),
    }
    events = list(trajectory_events("r", row))
    assert events[0]["args"]["token_sampler"] == "vllm"
    spans = [(event["ph"], event["name"], event["ts"] / 1e6 - 1000) for event in events]
    assert spans == [
        ("b", "p1.0", 0),
        ("e", "p1.0", 2),
        ("b", "prefill", 0),
        ("e", "prefill", 0.5),
        ("b", "decode", 0.5),
        ("e", "decode", 2),
    ]
    values = [{"name": "time/update", "value": 0.25}, {"name": "reward/mean", "value": 0.5}]
    step, counter = metric_events({"name": "trainer", "step": 3, "values": values, "measured_at": at(1)})
    assert (step["name"], step["dur"], step["ts"] + step["dur"]) == ("step 3", 250_000, 1001e6)
    assert (counter["ph"], counter["args"]) == ("C", {"value": 0.5})


def test_coalesced_records_carry_the_trace_of_their_prompt() -> None:
    settled = Block.of([SAMPLES[r.Settled]])
    outputs = [
        Output(TRAJECTORIES, "p12", SAMPLES[r.Trajectory]),
        Output(EXPERIENCES, "p12", SAMPLES[r.Experience]),
        Output(INBOX, "", SAMPLES[r.Assignment], 0),
        Output(INBOX, "", SAMPLES[r.Release], 0),
        Output(PROGRESS, "0", SAMPLES[r.Progress]),
        Output(SETTLED, "", settled),
        Output(BATCHES, "3", SAMPLES[r.MicroBatch], 0),
        Output(METRICS, "train", SAMPLES[r.Metric]),
        Output(INBOX, "", SAMPLES[r.Drain], 0),
    ]
    sent = coalesce(outputs, lambda topic: topic.name("first"))
    *traceparents, metric, drain = (dict(each.headers).get("traceparent", b"").decode() for each in sent)
    groups = [decode(each.value, each.headers)[0] for each in sent[:-2]]
    ids = [getattr(row, "trajectory_id", "") or getattr(row, "trajectory_ids", ["p12.0"])[0] for row in groups]
    for traceparent, trajectory in zip(traceparents, ids, strict=True):
        assert re.fullmatch(rf"00-{trace_id('first', trajectory.partition('.')[0])}-[0-9a-f]{{16}}-01", traceparent)
    assert len(set(traceparents)) == len({each.topic for each in sent[:-2]})  # each topic has its own span
    assert (metric, drain) == ("", "")
    assert not any(dict(each.headers).get("traceparent") for each in coalesce(outputs, lambda topic: "elsewhere"))
