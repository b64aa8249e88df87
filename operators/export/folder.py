"""The folder of an export, which holds all its state.

    README.md                                                    the dataset card
    data/experiences-p0-000000000000-000000004095.parquet        the rows of these offsets, both included
    _laminar/export.json                                         the contents: run, topic, view, condition
    _laminar/manifest-00000000.json                              one file: its offsets, rows, bytes, hash

The writer writes and syncs a file as `.tmp-...`, then writes and syncs its manifest, which makes the file valid, then
renames the file. A process that opens the folder finishes a missing rename and deletes files without a manifest. A
range begins where the one before it ended, so offsets without rows (transaction markers, aborted records, rows that the
condition excludes) are in a range too. A range without rows has a manifest and no file. The folder may be remote
(`infra/storage.py`): files are uploaded, and `_laminar/writer` names the process that opened it last.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from infra.closing import ClosedAtExit
from infra.files import sha256_of, sync_path
from infra.storage import StorageFolder, list_folder, local_file, rename, write_durable
from operators.export.config import Contents
from operators.export.formats import read_table, write_table
from operators.export.views import ViewName

DATA, STATE = "data", "_laminar"
TEMPORARY = ".tmp-"
MANIFESTS = "manifest-*.json"
_RANGE = re.compile(r"p[0-9]+-[0-9]+-[0-9]+")
_FILE = re.compile(r"([\w-]+(\.\w+)*)?")


class ExportError(RuntimeError):
    """The export folder cannot be used, or is damaged. The message says what is wrong and what to do."""


@dataclass(frozen=True)
class ExportPart:
    """A range of offsets of one partition, `first` to `last`, and the file with its rows ("" if it has no rows).

    `undecodable` has the offset and reason of each record that could not be decoded. `replaces` has the ranges of the
    older parts that this part replaces.
    """

    partition: int
    first: int
    last: int
    file: str
    rows: int
    bytes: int
    sha256: str
    undecodable: tuple[tuple[int, str], ...] = ()
    replaces: tuple[str, ...] = ()

    @property
    def range(self) -> str:
        """Partition and offsets, as in the name of its file."""
        return f"p{self.partition}-{self.first:012d}-{self.last:012d}"


def read_contents(root: StorageFolder) -> Contents:
    """The contents of the export in `root`. Raises ExportError if there is no export."""
    try:
        fields = json.loads((root / STATE / "export.json").read_text(encoding="utf-8"))
        starts = {int(partition): _count(offset) for partition, offset in fields.pop("starts").items()}
        messages = fields.pop("messages", False) is True
        texts: dict[str, Any] = {name: _text(value) for name, value in fields.items()}
        return Contents(**texts, starts=starts, messages=messages)
    except FileNotFoundError:
        raise ExportError(f"{root} is not an export ({STATE}/export.json is missing)") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ExportError(f"{root / STATE / 'export.json'} is damaged: {error}") from error


def recorded_contents(root: StorageFolder, topic: str, view: ViewName) -> Contents | None:
    """The contents of the export in `root` if it is one of this topic and view, else None. Raises ExportError."""
    if not (root / STATE / "export.json").exists():
        return None
    found = read_contents(root)
    return found if (found.topic, found.view) == (topic, view) else None


def read_parts(root: StorageFolder) -> list[ExportPart]:
    """The parts of the export in `root`, by partition and offset, without replaced ones. Raises ExportError."""
    parts: dict[str, ExportPart] = {}
    for path in list_folder(root / STATE, MANIFESTS):
        part = _read_part(path)
        parts[part.range] = part
        for name in part.replaces:
            parts.pop(name, None)
    return sorted(parts.values(), key=lambda part: (part.partition, part.first))


def next_offsets(contents: Contents, parts: Iterable[ExportPart]) -> dict[int, int]:
    """By partition: the first offset that is not in the export yet."""
    following = dict(contents.starts)
    for part in parts:
        following[part.partition] = max(following.get(part.partition, 0), part.last + 1)
    return following


class ExportFolder(ClosedAtExit):
    """An export's folder, open for writing by one process at a time. Raises ExportError if it cannot be opened."""

    def __init__(self, root: StorageFolder, contents: Contents | None = None) -> None:
        """Open `root`, or create it for `contents`. An existing export must have the same contents."""
        self.root = root
        if contents is None:
            read_contents(root)
        for folder in (root / DATA, root / STATE):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = -1
        self._writer = uuid.uuid4().hex
        try:
            self._take_lock()
            self.contents = self._fix_contents(contents)
            self._recover()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock, so that another process can open the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def parts(self) -> list[ExportPart]:
        """Its parts, by partition and offset."""
        return read_parts(self.root)

    def add(
        self,
        partition: int,
        first: int,
        last: int,
        rows: pa.Table,
        undecodable: Sequence[tuple[int, str]] = (),
        replaces: Sequence[str] = (),
    ) -> ExportPart:
        """Write `rows` of offsets `first` to `last`; the file is complete and durable on return. Raises ExportError."""
        part = ExportPart(partition, first, last, "", len(rows), 0, "", tuple(undecodable), tuple(replaces))
        name = f"{self.contents.topic}-{part.range}"
        try:
            if len(rows):
                name = f"{name}.{self.contents.format}"
                size, digest = self._write(name, rows)
                part = replace(part, file=name, bytes=size, sha256=digest)
            text = json.dumps(asdict(part), indent=1) + "\n"
            self._check_writer()
            write_durable(self.root / STATE / f"manifest-{self._next:08d}.json", text)
            self._next += 1
            self._publish(part)
        except OSError as error:
            raise ExportError(
                f"{name} cannot be written to {self.root}: {error.strerror or error}; "
                "existing files are complete, and the same command continues after them"
            ) from error
        return part

    def _write(self, name: str, rows: pa.Table) -> tuple[int, str]:
        """Write the temporary file for `name`; returns its size in bytes and its hash."""
        temporary = self.root / DATA / (TEMPORARY + name)
        if isinstance(temporary, Path):
            write_table(temporary, rows, self.contents.format)
            return temporary.stat().st_size, sha256_of(temporary)
        with TemporaryDirectory(prefix="laminar-export-") as scratch:
            local = Path(scratch) / name
            write_table(local, rows, self.contents.format)
            temporary.upload(local)
            return local.stat().st_size, sha256_of(local)

    def _check_writer(self) -> None:
        """Raise ExportError if another process has opened the remote folder since: the last to open it may write."""
        if not isinstance(self.root, Path) and (self.root / STATE / "writer").read_text() != self._writer:
            raise ExportError(f"another export has taken over {self.root}: this one ends")

    def _take_lock(self) -> None:
        if not isinstance(self.root, Path):  # no locks: the last to open it continues, others stop
            write_durable(self.root / STATE / "writer", self._writer)
            return
        self._lock = os.open(self.root / STATE / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ExportError(f"another export is writing to {self.root}: wait for it, or use another folder") from None

    def _fix_contents(self, wanted: Contents | None) -> Contents:
        """The contents of the folder; writes export.json for a new one. Raises ExportError for other contents."""
        file = self.root / STATE / "export.json"
        if wanted is None or file.exists():
            held = read_contents(self.root)
            if wanted is not None:
                _check_same(self.root, held, wanted)
            return held
        if any((self.root / DATA).iterdir()):
            raise ExportError(f"{self.root / DATA} has files of no export: use an empty folder")
        write_durable(file, json.dumps(asdict(replace(wanted, tokenizer="")), indent=1) + "\n")
        return wanted

    def _recover(self) -> None:
        """Finish or undo what a killed process has started."""
        manifests = list_folder(self.root / STATE, MANIFESTS)
        self._next = int(manifests[-1].name[len("manifest-") : -len(".json")]) + 1 if manifests else 0
        if manifests:
            self._publish(_read_part(self.root / STATE / f"manifest-{self._next - 1:08d}.json"))
        for left in [*(self.root / DATA).glob(f"{TEMPORARY}*"), *(self.root / STATE).glob(".*.tmp")]:
            left.unlink()

    def _publish(self, part: ExportPart) -> None:
        """Rename the file of `part`, if that is not done yet, and delete the files that it replaces."""
        data = self.root / DATA
        if part.file and (data / (TEMPORARY + part.file)).exists():
            rename(data / (TEMPORARY + part.file), data / part.file)
        for name in part.replaces:
            for file in list_folder(data, f"{self.contents.topic}-{name}.*"):
                file.unlink()
        if isinstance(data, Path):
            sync_path(data)


def _check_same(root: StorageFolder, held: Contents, wanted: Contents) -> None:
    for name in ("run", "topic", "format", "view", "split", "where", "messages"):
        existing, requested = getattr(held, name), getattr(wanted, name)
        if existing != requested:
            raise ExportError(f"{root} is an export with {name} {existing!r}, not {requested!r}: use another folder")


def _read_part(path: StorageFolder) -> ExportPart:
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        part = ExportPart(**fields)
        for number in (part.partition, part.first, part.last, part.rows, part.bytes):
            _count(number)
        undecodable = tuple((int(offset), str(reason)) for offset, reason in part.undecodable)
        part = replace(part, undecodable=undecodable, replaces=tuple(map(_text, part.replaces)))
        if not _FILE.fullmatch(_text(part.file)) or not all(map(_RANGE.fullmatch, part.replaces)):
            raise ValueError("it names files outside of the export")
        return part
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ExportError(f"{path} is damaged: {error}") from error


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{str(value)[:40]!r} is not an offset or a count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:40]!r} is not text")
    return value


def compact(root: StorageFolder, target_bytes: int) -> int:
    """Join the files of the export in `root` up to about `target_bytes` each; returns how many files fewer there are.

    After a kill every offset is still in exactly one valid file; the next process to open the folder deletes the
    replaced files. Raises ExportError if the folder is not an export or an export is writing to it.
    """
    with ExportFolder(root) as folder:
        runs = [run for run in joinable(folder.parts, target_bytes) if len(run) > 1]
        before = sum(bool(part.file) for run in runs for part in run)
        after = 0
        for run in runs:
            tables = [_read(root / DATA / part.file, folder.contents) for part in run if part.file]
            joined = folder.add(
                run[0].partition,
                run[0].first,
                run[-1].last,
                pa.concat_tables(tables) if tables else folder.contents.schema.empty_table(),
                [letter for part in run for letter in part.undecodable],
                [part.range for part in run],
            )
            after += bool(joined.file)
        return before - after


def _read(file: StorageFolder, contents: Contents) -> pa.Table:
    with local_file(file) as local:
        return read_table(local, contents.format, contents.schema)


def joinable(parts: Sequence[ExportPart], target_bytes: int) -> Iterator[list[ExportPart]]:
    """`parts`, sorted by partition and offset, as runs of consecutive ones of at most `target_bytes` in total.

    A larger part is a run of its own.
    """
    for _, of_partition in groupby(parts, lambda part: part.partition):
        run: list[ExportPart] = []
        for part in of_partition:
            if run and sum(each.bytes for each in run) + part.bytes > target_bytes:
                yield run
                run = []
            run.append(part)
        yield run
