"""The folder of an export, which is all the state that an export has.

    README.md                                                    the dataset card
    data/experiences-p0-000000000000-000000004095.parquet        rows of these offsets, both included
    _laminar/export.json                                         what the rows are
    _laminar/manifest-00000000.json                              a file: its offsets, rows, bytes, hash

A file is written as `.tmp-...` and synced; then its manifest is, which is the moment from which it counts; then it gets
its name. Who opens the folder ends what was left between the last two, and removes what was left before. A range
begins where the one before it ended, so offsets without rows (markers of transactions, aborted records, rows that a
condition leaves out) lie in some range, too; a range without any row has no file, and its manifest says so. The folder
may be a remote place (`infra/storage.py`): files are uploaded, and `_laminar/writer` names the last who opened it.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from infra.files import sync_folder
from infra.storage import StorageFolder, list_folder, rename, write_durable
from operators.export.config import Contents
from operators.export.formats import sha256, write_table

DATA, STATE = "data", "_laminar"
TEMPORARY = ".tmp-"
MANIFESTS = "manifest-*.json"


class ExportError(RuntimeError):
    """A folder that cannot be exported to, or is not what it should be: what is wrong, and what to do."""


@dataclass(frozen=True)
class ExportPart:
    """A range of offsets of one partition, `first` to `last`, and the file that holds its rows ("": it has none).

    `undecodable` are offset and reason of what is no record of ours. It `replaces` older parts, by their ranges.
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
        """Partition and offsets, as they stand in its file's name."""
        return f"p{self.partition}-{self.first:012d}-{self.last:012d}"


def read_contents(root: StorageFolder) -> Contents:
    """What the export in `root` holds. Raises ExportError where there is none."""
    try:
        said = json.loads((root / STATE / "export.json").read_text(encoding="utf-8"))
        starts = {int(partition): offset for partition, offset in said.pop("starts").items()}
        return Contents(**said, starts=starts)
    except FileNotFoundError:
        raise ExportError(f"{root} holds no export ({STATE}/export.json is missing)") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ExportError(f"{root / STATE / 'export.json'} is damaged: {error}") from error


def read_parts(root: StorageFolder) -> list[ExportPart]:
    """The parts of the export in `root` by partition and offset, replaced ones left out. Raises ExportError."""
    parts: dict[str, ExportPart] = {}
    for path in list_folder(root / STATE, MANIFESTS):
        part = _read_part(path)
        parts[part.range] = part
        for name in part.replaces:
            parts.pop(name, None)
    return sorted(parts.values(), key=lambda part: (part.partition, part.first))


def next_offsets(contents: Contents, parts: Iterable[ExportPart]) -> dict[int, int]:
    """By partition: the first offset that the export does not hold yet."""
    following = dict(contents.starts)
    for part in parts:
        following[part.partition] = max(following.get(part.partition, 0), part.last + 1)
    return following


class ExportFolder:
    """An export's folder, open for writing; one process at a time. Raises ExportError where it cannot be."""

    def __init__(self, root: StorageFolder, contents: Contents | None = None) -> None:
        """Open `root`, or make it for `contents`, which must be what it holds."""
        self.root = root
        if contents is None:
            read_contents(root)
        for folder in (root / DATA, root / STATE):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = -1
        self._writer = uuid.uuid4().hex
        try:
            self._take_lock()
            self.contents = self._settled(contents)
            self._recover()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let others open it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> ExportFolder:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def parts(self) -> list[ExportPart]:
        """What it holds."""
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
        """Write `rows`, those of offsets `first` to `last`; whole and durable when it returns. Raises ExportError."""
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
            self._place(part)
        except OSError as error:
            raise ExportError(
                f"{name} cannot be written to {self.root}: {error.strerror or error}; "
                "what is there is whole, and the same command goes on from it"
            ) from error
        return part

    def _write(self, name: str, rows: pa.Table) -> tuple[int, str]:
        """Write the temporary file of the file `name`: its bytes and their hash."""
        temporary = self.root / DATA / (TEMPORARY + name)
        if isinstance(temporary, Path):
            write_table(temporary, rows, self.contents.format)
            return temporary.stat().st_size, sha256(temporary)
        with TemporaryDirectory(prefix="laminar-export-") as scratch:
            local = Path(scratch) / name
            write_table(local, rows, self.contents.format)
            temporary.upload(local)
            return local.stat().st_size, sha256(local)

    def _check_writer(self) -> None:
        """Raise ExportError where another process has opened a remote folder since: it has the last word."""
        if not isinstance(self.root, Path) and (self.root / STATE / "writer").read_text() != self._writer:
            raise ExportError(f"another export has taken over {self.root}: this one ends")

    def _take_lock(self) -> None:
        if not isinstance(self.root, Path):  # an object store has no locks: who comes last goes on, the others end
            write_durable(self.root / STATE / "writer", self._writer)
            return
        self._lock = os.open(self.root / STATE / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ExportError(f"another export is writing to {self.root}: wait for its end, or take another") from None

    def _settled(self, wanted: Contents | None) -> Contents:
        """What the folder holds, now fixed. Raises ExportError where it holds something else."""
        file = self.root / STATE / "export.json"
        if wanted is None or file.exists():
            held = read_contents(self.root)
            if wanted is not None:
                _refuse_another(self.root, held, wanted)
            return held
        if any((self.root / DATA).iterdir()):
            raise ExportError(f"{self.root / DATA} holds files that are no export's: take an empty folder")
        write_durable(file, json.dumps(asdict(wanted), indent=1) + "\n")
        return wanted

    def _recover(self) -> None:
        """End what a killed process has begun, or undo it."""
        manifests = list_folder(self.root / STATE, MANIFESTS)
        self._next = int(manifests[-1].name[len("manifest-") : -len(".json")]) + 1 if manifests else 0
        if manifests:
            self._place(_read_part(self.root / STATE / f"manifest-{self._next - 1:08d}.json"))
        for left in [*(self.root / DATA).glob(f"{TEMPORARY}*"), *(self.root / STATE).glob(".*.tmp")]:
            left.unlink()

    def _place(self, part: ExportPart) -> None:
        """Give `part`'s file its name, where it has not got it yet, and remove what it replaces."""
        data = self.root / DATA
        if part.file and (data / (TEMPORARY + part.file)).exists():
            rename(data / (TEMPORARY + part.file), data / part.file)
        for name in part.replaces:
            for file in list_folder(data, f"{self.contents.topic}-{name}.*"):
                file.unlink()
        if isinstance(data, Path):
            sync_folder(data)


def _refuse_another(root: StorageFolder, held: Contents, wanted: Contents) -> None:
    for name in ("run", "topic", "format", "view", "where"):
        there, asked = getattr(held, name), getattr(wanted, name)
        if there != asked:
            raise ExportError(f"{root} is an export with {name} {there!r}, not {asked!r}: take another folder")


def _read_part(path: StorageFolder) -> ExportPart:
    try:
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        said["undecodable"] = tuple((int(offset), str(reason)) for offset, reason in said["undecodable"])
        said["replaces"] = tuple(said["replaces"])
        return ExportPart(**said)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ExportError(f"{path} is damaged: {error}") from error
