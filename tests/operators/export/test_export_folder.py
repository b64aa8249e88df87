"""The folder of an export: complete files of contiguous ranges, across kills."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from export_factories import CONTENTS, end_of, export, exported_to, polled, rows_of

from operators.export.folder import DATA, STATE, ExportError, ExportFolder, compact, read_parts
from operators.export.verify import verify

KILLS = 12


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in (folder / DATA).iterdir())


def test_export_names_files_by_contiguous_offset_ranges(tmp_path: Path) -> None:
    exported_to(tmp_path, [polled(0, 3), polled(4, 2, undecodable=(5,)), polled(7, 2, last=True)], file_bytes=1)
    assert names(tmp_path) == [
        "experiences-p0-000000000000-000000000003.parquet",
        "experiences-p0-000000000004-000000000006.parquet",
        "experiences-p0-000000000007-000000000009.parquet",
    ]
    table = pq.read_table(tmp_path / DATA)
    assert table["kafka_offset"].to_pylist() == [0, 0, 1, 1, 2, 2, 4, 4, 7, 7, 8, 8]
    assert table["kafka_row"].to_pylist() == [0, 1] * 6
    assert [part.undecodable for part in read_parts(tmp_path)] == [(), ((5, "nonsense"),), ()]
    assert verify(tmp_path).problems == []


def test_export_commits_only_offsets_in_files(tmp_path: Path) -> None:
    exporting = export(tmp_path, [polled(0, 3)])
    assert list(exporting.checkpoint({}).low_water.values()) == [0]
    exporting.fold(polled(4, 3, last=True))
    assert list(exporting.checkpoint({}).low_water.values()) == [8]
    exporting.close()


def test_export_writes_no_file_for_a_range_without_rows(tmp_path: Path) -> None:
    contents = replace(CONTENTS, where="reward > 2")
    exported_to(tmp_path, [polled(0, 3, last=True)], contents)
    assert names(tmp_path) == []
    assert end_of(tmp_path, contents) == 4
    assert verify(tmp_path).problems == []


def test_export_with_follow_writes_files_by_age(tmp_path: Path) -> None:
    exported_to(tmp_path, [polled(0, 3), polled(4, 1), polled(6, 1)], follow=True, every_s=1e-9)
    assert end_of(tmp_path) == 0  # the clock does not advance, so no rows are due


def test_export_folder_refuses_a_second_export(tmp_path: Path) -> None:
    exporting = export(tmp_path, [])
    with pytest.raises(ExportError, match="another export is writing"):
        ExportFolder(tmp_path, CONTENTS)
    exporting.close()
    with pytest.raises(ExportError, match="is an export with view 'full', not 'sft'"):
        ExportFolder(tmp_path, replace(CONTENTS, view="sft"))
    with pytest.raises(ExportError, match="is not an export"):
        ExportFolder(tmp_path / "other")
    (tmp_path / "mine" / DATA).mkdir(parents=True)
    (tmp_path / "mine" / DATA / "x").write_text("")
    with pytest.raises(ExportError, match="files of no export"):
        ExportFolder(tmp_path / "mine", CONTENTS)


@pytest.mark.parametrize("begun", ["no manifest", "no name"])
def test_export_folder_recovers_from_a_kill(tmp_path: Path, begun: str) -> None:
    exported_to(tmp_path, [polled(0, 3), polled(4, 3, last=True)], file_bytes=1)
    last = names(tmp_path)[-1]
    (tmp_path / DATA / last).rename(tmp_path / DATA / f".tmp-{last}")
    if begun == "no manifest":
        max((tmp_path / STATE).glob("manifest-*")).unlink()
    (tmp_path / STATE / ".manifest-00000009.json.1.tmp").write_text("{")
    assert verify(tmp_path).problems == []
    ExportFolder(tmp_path).close()
    assert end_of(tmp_path) == (4 if begun == "no manifest" else 8)
    assert len(names(tmp_path)) == (1 if begun == "no manifest" else 2)
    assert not list((tmp_path / STATE).glob(".*"))
    exported_to(tmp_path, [polled(end_of(tmp_path), 4, last=True)])
    assert verify(tmp_path).problems == []


def _damaged(folder: Path, how: str) -> None:
    files = [folder / DATA / name for name in names(folder)]
    manifests = sorted((folder / STATE).glob("manifest-*"))
    if how == "byte":
        data = bytearray(files[0].read_bytes())
        data[100] ^= 1
        files[0].write_bytes(bytes(data))
    elif how == "missing":
        files[0].unlink()
    elif how == "gap":
        manifests[0].unlink()
        files[0].unlink()
    elif how == "overlap":
        said = json.loads(manifests[1].read_text())
        manifests[1].write_text(json.dumps({**said, "first": 2}))
    elif how == "foreign":
        (folder / DATA / "mine.parquet").write_text("")
    elif how == "rows":
        said = json.loads(manifests[0].read_text())
        manifests[0].write_text(json.dumps({**said, "rows": 5}))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("byte", "its bytes differ from its manifest"),
        ("missing", "the file is missing"),
        ("gap", "offsets 0 to 3 are missing"),
        ("overlap", "offsets 2 to 3 are duplicated"),
        ("foreign", "it has no manifest"),
        ("rows", "it has 6 rows, not 5"),
    ],
)
def test_verify_finds_each_kind_of_damage(tmp_path: Path, how: str, reason: str) -> None:
    exported_to(tmp_path, [polled(0, 3), polled(4, 3, last=True)], file_bytes=1)
    _damaged(tmp_path, how)
    assert reason in "; ".join(verify(tmp_path).problems)


@pytest.mark.parametrize(
    "change",
    [
        {"replaces": ["/../../p0-000000000000-000000000001"]},
        {"replaces": ["*"]},
        {"file": "../../stolen.parquet"},
        {"file": ".."},
        {"file": 5},
        {"first": "0"},
        {"rows": -1},
        {"last": 1 << 70},
        {"undecodable": [[0]]},
    ],
    ids=str,
)
def test_export_rejects_a_manifest_that_names_other_files(change: dict[str, object], tmp_path: Path) -> None:
    """Whoever made the folder wrote its manifests: opening it must neither read nor delete what is not of it."""
    outside = tmp_path / "p0-000000000000-000000000001.parquet"
    outside.write_text("of another")
    root = tmp_path / "export"
    exported_to(root, [polled(0, 3, last=True)])
    (root / DATA / "experiences-").mkdir()
    (manifest,) = (root / STATE).glob("manifest-*")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    with pytest.raises(ExportError, match="is damaged"):
        read_parts(root)
    with pytest.raises(ExportError, match="is damaged"):
        ExportFolder(root)
    assert outside.exists()


def test_verify_raises_for_a_damaged_manifest(tmp_path: Path) -> None:
    exported_to(tmp_path, [polled(0, 3, last=True)])
    (manifest,) = (tmp_path / STATE).glob("manifest-*")
    manifest.write_text("{")
    with pytest.raises(ExportError, match="is damaged"):
        verify(tmp_path)


def test_export_raises_on_a_full_disk_and_keeps_files(tmp_path: Path) -> None:
    exported_to(tmp_path, [polled(0, 3, last=True)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = names(tmp_path)
    exporting = export(tmp_path, [polled(4, 3)])
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # Python ignores the signal: writing raises EFBIG
    try:
        with pytest.raises(ExportError, match=r"cannot be written .* the same command continues"):
            exporting.fold(polled(8, 1, last=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    exporting.close()
    assert names(tmp_path) == before
    exported_to(tmp_path, [polled(4, 4, last=True)])
    assert verify(tmp_path).problems == []


def test_killed_exports_have_no_gap_and_no_overlap(tmp_path: Path) -> None:
    """A process without threads forks exporters, which it kills, and verifiers of what they left."""
    program = Path(__file__).with_name("kill_exports.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "export"), str(KILLS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    kills, moved, ends = json.loads(done.stdout)
    assert kills == KILLS
    assert moved >= KILLS // 2  # it made progress between kills
    assert ends == 0


def test_compact_joins_consecutive_files_and_survives_a_kill(tmp_path: Path) -> None:
    exported_to(tmp_path, [polled(0, 3), polled(4, 2, undecodable=(5,)), polled(7, 2, last=True)], file_bytes=1)
    assert compact(tmp_path, 1) == 0
    before = {name: (tmp_path / DATA / name).read_bytes() for name in names(tmp_path)}
    assert compact(tmp_path, 1 << 20) == 2
    assert names(tmp_path) == ["experiences-p0-000000000000-000000000009.parquet"]
    assert pq.read_table(tmp_path / DATA)["kafka_offset"].to_pylist() == [0, 0, 1, 1, 2, 2, 4, 4, 7, 7, 8, 8]
    assert read_parts(tmp_path)[0].undecodable == ((5, "nonsense"),)
    for name, data in before.items():  # as if it was killed before it deleted the replaced files
        (tmp_path / DATA / name).write_bytes(data)
    ExportFolder(tmp_path).close()
    assert len(names(tmp_path)) == 1
    exported_to(tmp_path, [polled(10, 2, last=True)])
    assert verify(tmp_path).problems == []


def test_read_table_fills_columns_of_newer_releases_with_null(tmp_path: Path) -> None:
    from operators.export.formats import read_table, write_table

    rows = rows_of()
    write_table(tmp_path / "old.parquet", rows.drop_columns(["reward_error"]), "parquet")
    assert read_table(tmp_path / "old.parquet", "parquet", rows.schema).schema.equals(rows.schema)
