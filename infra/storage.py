"""Folders and files on any file system that pyarrow reaches: object stores by URI, everything mounted by path.

`s3://bucket/folder`, `gs://bucket/folder`, `abfss://...` and `hdfs://...` are remote; options follow a `?`, such as
`?endpoint_override=host:9000&scheme=http` for a private object store. Credentials come from the environment, as for the
provider's own tools. A remote file exists only once its upload is complete.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO
from urllib.parse import parse_qs, urlsplit

from infra.files import write_durably

SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
HTTP, HTTPS, HDFS = 80, 443, 8020
_PROBE = ".writable"
_PASSWORD = re.compile(r"[^/@?]*:[^@?]*@|[^?]*\?(.*&)?[^=&]*(key|secret|token|password)[^=&]*=", re.IGNORECASE)
"""After "://": a password before the host, which may contain slashes, or an option that is one."""


def port_of(place: str) -> int:
    """The port of the storage at the URI `place`: the one that it names, else that of its protocol.

    Raises ValueError if it is no number.
    """
    parts = urlsplit(place)
    options = parse_qs(parts.query)
    (server,) = options.get("endpoint_override", [parts.netloc])[:1]
    in_clear_text = server.startswith("http://") or options.get("scheme") == ["http"]
    default = HDFS if parts.scheme in ("hdfs", "viewfs") else HTTP if in_clear_text else HTTPS
    return urlsplit(f"//{server.rpartition('//')[2]}").port or default


class RemotePath:
    """A file or folder at `uri`, with the part of the pathlib.Path interface that is needed here.

    It contains only the URI, so it can be sent to other processes; each process opens its own connection. All methods
    raise OSError if the store refuses or does not respond.
    """

    def __init__(self, uri: str) -> None:
        before, mark, options = uri.partition("?")
        self._uri, self._options = before.rstrip("/"), mark + options

    @property
    def name(self) -> str:
        return self._uri.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self._uri.rpartition("/")[0] + self._options)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self._uri}/{name}{self._options}")

    def __str__(self) -> str:
        return self._uri

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and (self._uri, self._options) == (other._uri, other._options)

    def __hash__(self) -> int:
        return hash((self._uri, self._options))

    def exists(self) -> bool:
        """Whether the file or folder exists."""
        system, path = self._open()
        return _exists(system, path)

    def absolute(self) -> RemotePath:
        """Return this path, which is always absolute."""
        return self

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: a folder exists as soon as it contains a file."""

    def iterdir(self) -> Iterator[RemotePath]:
        """The entries of the folder, sorted by name; none if it does not exist."""
        from pyarrow.fs import FileSelector

        system, path = self._open()
        selected = FileSelector(path, allow_not_found=True)
        yield from (self / name for name in sorted(info.base_name for info in system.get_file_info(selected)))

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """The entries of the folder whose names match `pattern`."""
        return (each for each in self.iterdir() if fnmatch(each.name, pattern))

    def size(self) -> int:
        """The size of the file in bytes. Raises FileNotFoundError."""
        system, path = self._open()
        info = system.get_file_info(path)
        if not info.is_file:
            raise FileNotFoundError(f"there is no file {self}")
        return int(info.size)

    def read_bytes(self) -> bytes:
        """Read the file."""
        system, path = self._open()
        with system.open_input_stream(path) as source:
            return bytes(source.read())

    def read_text(self, encoding: str = "utf-8") -> str:
        """Read the file as text."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: bytes) -> None:
        """Write the file, or replace it."""
        system, path = self._open()
        with system.open_output_stream(path) as sink:
            sink.write(data)

    @contextmanager
    def open_output(self) -> Iterator[BinaryIO]:
        """A stream whose bytes become this file, or replace it, when the `with` block ends."""
        system, path = self._open()
        with system.open_output_stream(path) as sink:
            yield sink

    @contextmanager
    def open_input(self) -> Iterator[Any]:
        """The file for reads at any position (`read_at(count, offset)`) during the `with` block."""
        system, path = self._open()
        with system.open_input_file(path) as source:
            yield source

    def upload(self, file: Path) -> None:
        """Copy the local `file` to this path."""
        system, path = self._open()
        with file.open("rb") as source, system.open_output_stream(path) as sink:
            shutil.copyfileobj(source, sink, 8 << 20)

    def download(self, file: Path) -> None:
        """Copy this file to the local `file`."""
        system, path = self._open()
        with system.open_input_stream(path) as source, file.open("wb") as sink:
            shutil.copyfileobj(source, sink, 8 << 20)

    def replace(self, to: RemotePath) -> None:
        """Move the file to another path of the same store."""
        system, path = self._open()
        system.move(path, to._open()[1])

    def unlink(self) -> None:
        """Remove the file."""
        system, path = self._open()
        system.delete_file(path)

    def remove_tree(self) -> None:
        """Remove the folder with its contents, if it exists."""
        system, path = self._open()
        if _exists(system, path):
            system.delete_dir(path)

    def _open(self) -> tuple[Any, str]:
        scheme, _, rest = self._uri.partition("://")
        host, _, within = rest.partition("/")
        system, base = _connect(f"{scheme}://{host}{self._options}")
        return system, f"{base}/{within}" if within else base


StorageFolder = Path | RemotePath


def open_storage(text: str) -> StorageFolder:
    """Return a remote path if `text` starts with one of `SCHEMES`, else a local path.

    Raises ValueError for another scheme, and for a URI with a password: configurations and exports, which others may
    read, contain it. Other errors appear on first use.
    """
    scheme, mark, rest = text.partition("://")
    if not mark:
        return Path(text)
    if scheme == "file":
        return Path(rest)
    if scheme not in SCHEMES:
        raise ValueError(
            f"the scheme of {scheme[:20]!r}://... must be one of file, {', '.join(SCHEMES)}, or use a path without one"
        )
    if _PASSWORD.match(rest) and scheme not in ("hdfs", "viewfs"):  # these have ports, and no passwords
        raise ValueError(
            f"the URI {scheme}://... contains a password: remove it, and put credentials into the environment, as for "
            "the provider's own tools (S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)"
        )
    return RemotePath(text)


def check_storage(name: str, text: str) -> None:
    """Raise ValueError, as `open_storage` does, with the name of the setting whose value is `text`."""
    try:
        if isinstance(open_storage(text), RemotePath):
            port_of(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def probe_writable(folder: StorageFolder, name: str = _PROBE) -> None:
    """Create `folder` and verify that files can be written there, by one called `name`. Raises OSError.

    Processes that may do so at once need different names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"x")
    (folder / name).unlink()


@contextmanager
def local_copy(folder: StorageFolder, names: tuple[str, ...]) -> Iterator[Path]:
    """The folder itself, or a local copy of the files `names` of a remote folder, during the `with` block."""
    if isinstance(folder, Path):
        yield folder
        return
    with TemporaryDirectory(prefix="laminar-copy-") as scratch:
        for name in names:
            (folder / name).download(Path(scratch) / name)
        yield Path(scratch)


@contextmanager
def local_file(file: StorageFolder) -> Iterator[Path]:
    """The file itself, or a local copy of a remote file, during the `with` block."""
    with local_copy(file.parent, (file.name,)) as folder:
        yield folder / file.name


class RangeReader:
    """Reads ranges of `file`, on a disk or in an object store, during its `with` block. `size` is the file's bytes."""

    def __init__(self, file: StorageFolder) -> None:
        self._file, self._closing = file, ExitStack()
        self.size = file.stat().st_size if isinstance(file, Path) else file.size()

    def __enter__(self) -> RangeReader:
        opened = self._file.open("rb", buffering=0) if isinstance(self._file, Path) else self._file.open_input()
        self._source = self._closing.enter_context(opened)
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def read_into(self, offset: int, memory: memoryview) -> None:
        """Fill `memory`, bytes, with the bytes at `offset`. Raises ValueError if the file ends before."""
        while memory:
            if isinstance(self._file, Path):
                count = os.preadv(self._source.fileno(), [memory], offset)
            else:
                data = self._source.read_at(len(memory), offset)
                count = len(data)
                memory[:count] = data
            if not count:
                raise ValueError(f"{self._file} ends at byte {offset}")
            memory, offset = memory[count:], offset + count


def list_folder(folder: StorageFolder, pattern: str = "*") -> list[StorageFolder]:
    """The entries of `folder` whose names match `pattern`, sorted by name."""
    found: Iterable[StorageFolder] = folder.glob(pattern)
    return sorted(found, key=lambda each: each.name)


def rename(file: StorageFolder, to: StorageFolder) -> None:
    """Rename `file` to `to`, on the same store. Raises ValueError for different stores."""
    if isinstance(file, Path):
        file.replace(str(to))
    elif isinstance(to, RemotePath):
        file.replace(to)
    else:
        raise ValueError(f"{file} cannot be moved to {to}: they are on different stores")


def write_durable(file: StorageFolder, text: str) -> None:
    """Write `text` to `file`, complete and durable when this returns."""
    if isinstance(file, Path):
        write_durably(file, text)
    else:
        file.write_bytes(text.encode("utf-8"))


@lru_cache
def _connect(root: str) -> tuple[Any, str]:
    """The file system of a bucket or host, and its path there; one connection per process."""
    from pyarrow.fs import FileSystem  # imported here: loading a configuration must be fast

    try:
        system, path = FileSystem.from_uri(root)
    except (ValueError, NotImplementedError) as error:
        raise OSError(f"{RemotePath(root)} cannot be opened: {error}") from error
    return system, str(path).rstrip("/")


def _exists(system: Any, path: str) -> bool:
    from pyarrow.fs import FileType

    return bool(system.get_file_info(path).type != FileType.NotFound)
