"""Exports to an object store: the guarantees of a local folder hold there too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from export_factories import CONTENTS, end_of, export, exported_to, polled
from object_store import ObjectStore, object_store

from infra.storage import RemotePath, local_file
from operators.export.card import write_card
from operators.export.folder import DATA, STATE, ExportError, ExportFolder, compact
from operators.export.import_plan import ImportedSpan, plan_import
from operators.export.verify import verify


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as running:
        yield running


def names(root: RemotePath) -> list[str]:
    return [file.name for file in (root / DATA).iterdir()]


def test_remote_export_continues_where_it_ended(store: ObjectStore) -> None:
    root = RemotePath(store.bucket("goes-on"))
    exported_to(root, [polled(0, 3), polled(4, 2, undecodable=(5,), last=True)], file_bytes=1)
    exported_to(root, [polled(7, 2, last=True)])
    assert names(root) == [
        "experiences-p0-000000000000-000000000003.parquet",
        "experiences-p0-000000000004-000000000006.parquet",
        "experiences-p0-000000000007-000000000009.parquet",
    ]
    assert verify(root).problems == []
    write_card(root)
    assert "12 rows in 3 files" in (root / "README.md").read_text()
    assert len(plan_import(root, CONTENTS, ImportedSpan({0: 0}, {0: 10}))) == 12


@pytest.mark.parametrize("begun", ["no manifest", "no name"])
def test_remote_export_recovers_from_a_kill(store: ObjectStore, begun: str) -> None:
    root = RemotePath(store.bucket(f"killed-{begun.replace(' ', '-')}"))
    exported_to(root, [polled(0, 3), polled(4, 3, last=True)], file_bytes=1)
    last = names(root)[-1]
    (root / DATA / last).replace(root / DATA / f".tmp-{last}")
    if begun == "no manifest":
        (root / STATE / "manifest-00000001.json").unlink()
    assert verify(root).problems == []
    ExportFolder(root).close()
    assert end_of(root) == (4 if begun == "no manifest" else 8)
    assert len(names(root)) == (1 if begun == "no manifest" else 2)


def test_remote_verify_finds_damage(store: ObjectStore) -> None:
    root = RemotePath(store.bucket("damage"))
    exported_to(root, [polled(0, 3), polled(4, 3, last=True)], file_bytes=1)
    first, second = names(root)
    data = bytearray((root / DATA / first).read_bytes())
    data[100] ^= 1
    (root / DATA / first).write_bytes(bytes(data))
    (root / DATA / second).unlink()
    assert verify(root).problems == [
        f"{first}: its bytes differ from its manifest",
        f"{second}: the file is missing",
    ]


def test_remote_export_stops_after_another_takes_over(store: ObjectStore) -> None:
    root = RemotePath(store.bucket("taken-over"))
    first = export(root, [polled(0, 3)])
    exported_to(root, [polled(0, 3, last=True)])
    with pytest.raises(ExportError, match=r"another export has taken over s3://taken-over/folder: this one ends"):
        first.fold(polled(4, 3, last=True))
    first.close()
    exported_to(root, [polled(4, 3, last=True)])
    assert verify(root).problems == []


def test_remote_compact_joins_consecutive_files(store: ObjectStore) -> None:
    root = RemotePath(store.bucket("compact"))
    exported_to(root, [polled(0, 3), polled(4, 3), polled(8, 3, last=True)], file_bytes=1)
    assert compact(root, 1 << 20) == 2
    assert names(root) == ["experiences-p0-000000000000-000000000011.parquet"]
    assert verify(root).problems == []
    with local_file(root / DATA / names(root)[0]) as file:
        assert file.stat().st_size == (root / DATA / names(root)[0]).size()


def test_remote_export_names_a_missing_bucket(store: ObjectStore) -> None:
    with pytest.raises(OSError, match="NO_SUCH_BUCKET"):
        ExportFolder(RemotePath(store.uri("nowhere/folder")), CONTENTS)
