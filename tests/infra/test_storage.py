"""Storage: local paths and object stores with one interface."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_store import ObjectStore, object_store

from infra.storage import RemotePath, local_copy, open_storage, port_of, write_durable


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as running:
        yield running


@pytest.fixture
def folder(store: ObjectStore, request: pytest.FixtureRequest) -> RemotePath:
    found = open_storage(store.bucket(request.node.name.replace("_", "-")[:60].lower()))
    assert isinstance(found, RemotePath)
    return found


@pytest.mark.parametrize(
    ("place", "port"),
    [
        ("s3://bucket/folder", 443),
        ("s3://bucket/folder?region=us-east-1", 443),
        ("s3://bucket/folder?endpoint_override=minio:9000&scheme=http", 9000),
        ("s3://bucket?scheme=https&endpoint_override=https://minio.example:9443", 9443),
        ("s3://bucket?endpoint_override=minio&scheme=http", 80),
        ("abfss://container@account.dfs.core.windows.net/folder", 443),
        ("s3://bucket?endpoint_override=http://minio", 80),
        ("hdfs://names:8120/folder", 8120),
        ("hdfs://names/folder", 8020),
    ],
)
def test_port_of_an_object_store_follows_from_its_uri(place: str, port: int) -> None:
    assert port_of(place) == port


def test_open_storage_returns_a_path_or_a_remote_path() -> None:
    assert open_storage("runs/first") == Path("runs/first")
    assert open_storage("file:///mnt/first") == Path("/mnt/first")
    remote = open_storage("s3://bucket/a/b/?region=x") / "c"
    assert isinstance(remote, RemotePath)
    assert (remote.name, str(remote), str(remote.parent)) == ("c", "s3://bucket/a/b/c", "s3://bucket/a/b")
    assert pickle.loads(pickle.dumps(remote)) == remote
    for uri in ("abfss://container@account.dfs.core.windows.net/a", "hdfs://host:8020/a@b", "s3://bucket/a:b@c"):
        assert str(open_storage(uri)) == uri


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("ftp://key:hidden@host/x", "scheme of 'ftp'://... must be one of file, s3, gs"),
        ("s3://key:hidden@bucket/x", "contains a password: remove it"),
        ("s3://key:hid/hidden+@bucket/x", "contains a password: remove it"),
        ("s3://key:1/hidden@bucket/x?region=x", "contains a password: remove it"),
        ("s3://bucket/x?region=y&secret_key=hidden", "contains a password: remove it"),
        ("abfss://container@account.dfs/x?SAS_TOKEN=hidden", "contains a password: remove it"),
    ],
)
def test_open_storage_refuses_passwords_without_showing_them(uri: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as refused:
        open_storage(uri)
    assert "hid" not in str(refused.value)


def test_remote_path_writes_reads_moves_and_removes_files(folder: RemotePath, tmp_path: Path) -> None:
    assert not folder.exists()
    assert list(folder.iterdir()) == []
    (folder / "a.json").write_bytes(b"{}")
    (tmp_path / "large").write_bytes(bytes(12 << 20))  # in several parts
    (folder / "sub" / "large").upload(tmp_path / "large")
    assert [each.name for each in folder.iterdir()] == ["a.json", "sub"]
    assert list(folder.glob("*.json")) == [folder / "a.json"]
    assert (folder / "sub" / "large").size() == 12 << 20
    with local_copy(folder, ("a.json",)) as local:
        assert (local / "a.json").read_bytes() == b"{}"
    assert not local.exists()
    (folder / "a.json").replace(folder / "b.json")
    assert [(folder / name).exists() for name in ("a.json", "b.json")] == [False, True]
    write_durable(folder / "b.json", "new")
    assert (folder / "b.json").read_text() == "new"
    (folder / "b.json").unlink()
    (folder / "sub").remove_tree()
    assert not (folder / "sub" / "large").exists()


def test_remote_path_errors_name_the_missing_file(folder: RemotePath, store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file s3://"):
        (folder / "none").size()
    with pytest.raises(FileNotFoundError):
        (folder / "none").download(tmp_path / "none")
    with pytest.raises(OSError, match="NO_SUCH_BUCKET"):
        (RemotePath(store.uri("no-such-bucket")) / "x").write_bytes(b"x")
    with pytest.raises(OSError, match=r"s3://bucket cannot be opened: .*nonsense"):
        RemotePath("s3://bucket/x?nonsense=1").exists()
