"""`laminar export` on a real broker: committed rows are exported exactly once."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from exported_topics import Laminar, Topics
from object_store import object_store

from infra.kafka.admin import TopicSpec, admin_client, create_topics, delete_topics
from schemas.topics import EXPERIENCES


def test_export_resumes_and_writes_committed_rows_once(topics: Topics, laminar: Laminar, tmp_path: Path) -> None:
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
    for reason in (
        "no laminar-schema header",
        "unknown schema",
        "is JSON and cannot be read as columns",
        "not a valid Arrow",
    ):
        assert reason in reasons
    assert "16 rows" in (tmp_path / "full" / "README.md").read_text()

    _remove_a_row(tmp_path / "full")
    code, out, _ = laminar("export", "verify", folder, "--log")
    assert code == 1
    assert "rows of the log are missing from it" in out


def _remove_a_row(folder: Path) -> None:
    """Remove a row and update the manifest, as an export that lost a row would."""
    from infra.files import sha256_of

    manifest = min((folder / "_laminar").glob("manifest-*"))
    entry = json.loads(manifest.read_text())
    file = folder / "data" / entry["file"]
    table = pq.read_table(file)
    pq.write_table(table.slice(1), file)
    entry |= {"rows": len(table) - 1, "bytes": file.stat().st_size, "sha256": sha256_of(file)}
    manifest.write_text(json.dumps(entry))


def test_export_applies_filters_views_and_offsets(topics: Topics, laminar: Laminar, tmp_path: Path) -> None:
    topics.write(range(6))
    options = ("--where", "reward > 0.5", "--since-version", "2", "--since-offset", "1", "--view", "trl")
    code, out, err = laminar(
        "export", "experiences", str(tmp_path), "--run", topics.run, *options, "--format", "jsonl", "--json"
    )
    assert code == 0, err
    lines = [json.loads(line) for file in (tmp_path / "data").iterdir() for line in file.read_text().splitlines()]
    assert sorted(line["trajectory_id"] for line in lines) == ["p2.0", "p3.0", "p4.0", "p5.0"]
    assert lines[0]["prompt"] == "1 + 1"
    assert json.loads(out)["offsets"] == {"0": [1, 4], "1": [1, 4]}
    assert laminar("export", "verify", str(tmp_path), "--log")[0] == 0


def test_export_of_json_records_is_verified(topics: Topics, laminar: Laminar, tmp_path: Path) -> None:
    topics.write_metrics(range(5))
    assert laminar("export", "metrics", str(tmp_path), "--run", topics.run, "--format", "arrow")[0] == 0
    assert laminar("export", "verify", str(tmp_path), "--log")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("nonsense", "d"), "is not a topic"),
        (("experiences", "d", "--where", "rewrad > 1"), "the nearest is reward"),
        (("metrics", "d", "--view", "sft"), "the view sft is of experiences"),
        (("experiences", "d", "--since-time", "then"), "is not a time"),
        (("experiences",), "Missing argument"),
    ],
)
def test_export_exits_with_2_on_invalid_arguments(
    laminar: Laminar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = laminar("export", *arguments, "--run", "a")
    assert code == 2
    assert reason in " ".join(err.replace("│", " ").split())
    assert not list(tmp_path.iterdir())


def test_export_fails_for_a_recreated_topic(topics: Topics, laminar: Laminar, tmp_path: Path) -> None:
    topics.write(range(4))
    arguments = ("export", "experiences", str(tmp_path), "--run", topics.run)
    assert laminar(*arguments)[0] == 0
    with admin_client(topics.client) as admin:
        delete_topics(admin, EXPERIENCES.name(topics.run))
        create_topics(admin, [TopicSpec(EXPERIENCES.name(topics.run), 2)])
    code, _, err = laminar(*arguments)
    assert code == 1
    assert "deleted and created again, or this is another Kafka" in err
    assert len(err.strip().splitlines()[-1].split("\n")) == 1


def test_export_that_fails_says_how_to_continue(
    topics: Topics, laminar: Laminar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose Kafka stays away for longer than its sources try."""

    def fail(*_: object) -> None:
        raise RuntimeError("NodeNotReadyError: no broker [while running 'read experiences']")

    topics.write(range(4))
    monkeypatch.setattr("infra.runners.run.run_pipeline", fail)
    code, _, err = laminar("export", "experiences", str(tmp_path), "--run", topics.run)
    again = f"what was written to {tmp_path} is valid: the same command continues the export"
    assert (code, err.splitlines()[-1]) == (1, f"laminar: NodeNotReadyError: no broker; {again}")


def test_export_to_object_store_is_verified(topics: Topics, laminar: Laminar) -> None:
    with object_store() as store:
        uri = store.bucket("answers")
        topics.write(range(6))
        code, out, err = laminar("export", "experiences", uri, "--run", topics.run, "--json")
        assert code == 0, err
        topics.write(range(6, 8))
        assert json.loads(laminar("export", "experiences", uri, "--run", topics.run, "--json")[1])["rows"] == 16
        assert json.loads(out)["folder"] == "s3://answers/folder"
        proof = json.loads(laminar("export", "verify", uri, "--log", "--json")[1])
        assert (proof["problems"], proof["rows"]) == ([], 16)
