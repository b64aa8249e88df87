"""Import of exported experiences into another run: every row once, with new ids, across kills."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from buffer_harness import Buffer
from export_factories import CONTENTS, block, experience, exported_to, polled, rows_of
from in_memory_log import Log, Shard
from record_factories import PARTITIONS, manifest, shard, version

from operators.export import import_rows
from operators.export.config import Contents
from operators.export.folder import ExportError, ExportFolder
from operators.export.formats import Format, read_table, write_table
from operators.export.import_plan import plan_groups
from operators.export.import_rows import COLUMNS, ImportRows, as_experiences
from operators.io.elements import PartitionKey, Polled, ReceivedRecord
from pipelines.inspect.audit.fold import AuditFold
from schemas.records import Experience, Metric, VersionSpan
from schemas.topics import BATCHES, EXPERIENCES, METRICS, SETTLED


def imported(folder: Path, log: Log, chance: random.Random | None = None) -> Metric:
    """Import the dataset in `folder`, with crashes before and after commits by `chance`; returns the final metric."""
    importing = Shard(log, shard("import"), ImportRows(folder, PARTITIONS).restore)
    importing.start()
    before = len(log.rows(METRICS))
    while len(log.rows(METRICS)) == before:
        importing.turn()
        if chance is None or chance.random() < 0.5:
            importing.commit()
        if chance is not None and chance.random() < 0.5 and len(log.rows(METRICS)) == before:
            importing.start()
    metric: Metric = log.rows(METRICS)[-1]
    return metric


def origins(log: Log) -> list[str]:
    return [record.trajectory.prompt.round for record in log.rows(EXPERIENCES)]


def test_plan_groups_numbers_rows_by_group_in_order() -> None:
    plan = plan_groups(pa.array(["p4", "p1", "p4", "e9", "p1", "p4"]))
    assert plan.numbers.tolist() == [0, 1, 0, 2, 1, 0]
    assert plan.members.tolist() == [0, 0, 1, 0, 1, 2]
    assert plan.sizes.tolist() == [3, 2, 3, 1, 2, 3]
    assert plan.groups == 3
    assert plan_groups(pa.array([], pa.utf8())).groups == 0


@pytest.mark.parametrize("seed", range(6))
def test_import_writes_each_row_once_across_kills_and_later_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(import_rows, "MAX_ROWS_PER_FOLD", 3)
    log, chance = Log(), random.Random(seed)
    exported_to(tmp_path, [polled(0, 4), polled(5, 3, last=True)], file_bytes=1)
    importing = Shard(log, shard("import"), ImportRows(tmp_path, PARTITIONS).restore)
    importing.start()
    importing.run(2)  # it crashes with six rows written, and the dataset grows
    exported_to(tmp_path, [polled(9, 2, last=True)])
    metrics = [imported(tmp_path, log, chance).values for _ in range(3)]
    assert [values["trajectories"] for values in metrics] == [14.0, 4.0, 0.0]
    assert [values["first"] for values in metrics] == [0.0, 7.0, 9.0]
    offsets = [0, 1, 2, 3, 5, 6, 7, 9, 10]
    assert sorted(origins(log)) == sorted(f"run/experiences 0:{offset}.{row}" for offset in offsets for row in (0, 1))
    ids = [record.trajectory.trajectory_id for record in log.rows(EXPERIENCES)]
    assert sorted(ids) == sorted(f"i{number}.{member}" for number in range(9) for member in (0, 1))
    for partition in range(PARTITIONS):
        rows = log.received(PartitionKey(EXPERIENCES.short_name, partition), 0, 10**6)
        assert rows
        assert {row.record.trajectory.prompt.number % PARTITIONS for row in rows} == {partition}


@pytest.mark.parametrize("form", ["parquet", "arrow", "jsonl"])
def test_imported_row_differs_only_in_identity_and_version(tmp_path: Path, form: Format) -> None:
    log = Log()
    exported_to(tmp_path, [polled(3, 1, last=True)], replace(CONTENTS, format=form, starts={0: 3}))
    imported(tmp_path, log)
    before, after = experience(3, 1, 0.0), log.rows(EXPERIENCES)[1]
    made: Experience = replace(before, scored_at=after.scored_at)
    asked = replace(made.trajectory.prompt, number=0, purpose="imported", round="run/experiences 0:3.1")
    unborn = version(0, epoch=0)
    spans = (VersionSpan(unborn, 4),)
    assert after == replace(
        made, trajectory=replace(made.trajectory, prompt=asked, version_spans=spans, newest_version=unborn)
    )
    assert after.scored_at > 10**12


def test_id_of_a_dataset_is_that_of_earlier_releases() -> None:
    """Another id would import a dataset again whose rows an earlier release has imported."""
    contents = Contents("golden", "experiences", starts={0: 0, 1: 5})
    assert import_rows.dataset_id(contents) == "bc248c7c370d1189"


def test_dataset_of_an_earlier_release_lacks_what_was_added(tmp_path: Path) -> None:
    file, contents = tmp_path / "rows.parquet", Contents("run", "experiences")
    write_table(file, rows_of(experience(3)).drop_columns(["prompt_messages", "token_sampler"]), "parquet")
    plan = plan_groups(pa.array(["p3"]))
    (made,) = as_experiences(read_table(file, "parquet", COLUMNS), contents, plan, 0, 0, now=1).records()
    assert (made.trajectory.prompt.messages, made.trajectory.token_sampler) == ((), None)
    assert made.trajectory.text == experience(3).trajectory.text


def test_imported_groups_are_trained_with_groups_of_the_run(tmp_path: Path) -> None:
    buffer = Buffer(global_batch=4)
    exported_to(tmp_path, [polled(0, 3, last=True)])
    imported(tmp_path, buffer.log)
    for number in range(3):
        buffer.group(number)
    buffer.publish(7)
    for _ in range(4):
        buffer.shard.run()
        buffer.shard.start()
    names = sorted(name for batch in buffer.batches() for name in batch)
    assert names == sorted(f"{letter}{n}.{m}" for letter in "pi" for n in range(3) for m in (0, 1))
    assert Counter(buffer.outcomes().values()) == {"batched": 6, "imported": 6}
    assert buffer.log.committed(buffer.shard.config.group).state["settled"] == {"i0": 2, "i1": 1, "p0": 2, "p1": 1}
    staleness = {r.trajectory_id: r.staleness for r in buffer.log.rows(SETTLED)}
    assert staleness["i0.0"] == 7  # counted from the first version of the run
    assert len({r.batch for r in buffer.log.rows(SETTLED)}) == 3
    _check_audit_passes(buffer.log)


def _check_audit_passes(log: Log) -> None:
    fold = AuditFold()
    fold.manifest(manifest(version(1), batches=(0, 1)))
    for row in log.rows(SETTLED):
        fold.settled(row)
    for row in log.rows(BATCHES):
        fold.batch(row)
    for row in log.rows(EXPERIENCES):
        key = row.trajectory.prompt
        fold.experience((key.purpose, key.number, row.trajectory.member), consumed=True)  # type: ignore[arg-type]
    audit = fold.audit()
    assert audit.passed
    counts = audit.numbers()
    assert counts["trained"] + counts["imported"] == 8
    assert counts["imported"] >= 2
    assert counts["in_flight"] == 4


def test_import_skips_held_out_rows(tmp_path: Path) -> None:
    held_out = experience(0)
    prompt = replace(held_out.trajectory.prompt, purpose="evaluation")
    held_out = replace(held_out, trajectory=replace(held_out.trajectory, prompt=prompt))
    rows = (ReceivedRecord("experiences", 0, 0, block(held_out, experience(1)), 1000),)
    exported_to(tmp_path, [Polled("group", 1, rows, (), {PartitionKey("experiences", 0): 1}, True, True)])
    log = Log()
    assert imported(tmp_path, log).values["trajectories"] == 1
    assert origins(log) == ["run/experiences 0:0.1"]


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (replace(CONTENTS, view="sft"), "this is the view sft of experiences"),
        (Contents("run", "metrics", starts={0: 0}), "this is the view full of metrics"),
    ],
)
def test_import_refuses_a_dataset_without_tokens(tmp_path: Path, contents: Contents, reason: str) -> None:
    ExportFolder(tmp_path, contents).close()
    with pytest.raises(ExportError, match=reason):
        imported(tmp_path, Log())


def test_import_refuses_a_damaged_file(tmp_path: Path) -> None:
    exported_to(tmp_path, [polled(0, 3, last=True)])
    (file,) = (tmp_path / "data").iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    log = Log()
    with pytest.raises(ExportError, match="its bytes differ from its manifest"):
        imported(tmp_path, log)
    assert log.rows(EXPERIENCES) == []
