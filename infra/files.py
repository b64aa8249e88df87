"""Files that are whole or not there, and the disk that they are on."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

BLOCK_BYTES = 4096
"""A block of a disk, in bytes."""
MIN_FREE_BYTES = 16 * 1024 * 1024
"""A disk with fewer bytes free counts as full: no log segment of a broker fits."""


def is_out_of_space(error: BaseException | None) -> bool:
    """Whether `error`, or what caused it, is a write that a full disk or a quota refused."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


def describe_free_space(path: Path) -> str:
    """How much room there is where `path` is or would be, in words."""
    while not path.exists() and path != path.parent:
        path = path.parent
    usage = shutil.disk_usage(path)
    return f"{usage.free:,} of {usage.total:,} bytes are free on the disk of {path}"


def is_full(path: Path) -> bool:
    """Whether the disk that `path` is on has no room left; False where there is no such path."""
    try:
        return shutil.disk_usage(path).free < MIN_FREE_BYTES
    except OSError:
        return False


PRIVATE_UMASK = 0o077
UMASK_VARIABLE = "LAMINAR_UMASK"
"""An octal umask for what others shall read, as "022"; without it what is written is its owner's alone."""


def keep_files_private() -> None:
    """From now on nobody else may read what this process, and whatever it starts, writes. Raises ValueError."""
    wanted = os.environ.get(UMASK_VARIABLE)
    try:
        umask = PRIVATE_UMASK if not wanted else int(wanted, 8)
        if not 0 <= umask <= 0o777:
            raise ValueError
    except ValueError:
        raise ValueError(f'{UMASK_VARIABLE} must be an octal umask, as "022", not {wanted!r}') from None
    os.umask(umask)


def write_atomically(file: Path, text: str) -> None:
    """Write `text` to `file` so that a reader sees the old content or the new, never a part."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def write_even_if_disk_full(file: Path, text: str) -> None:
    """As `write_atomically`, of a text that may end in blanks; on a full disk over what `file` holds, in its blocks.

    A reader may then see a part for a moment. Raises OSError where those are too few: `BLOCK_BYTES` is kept for growth.
    """
    data = text.encode("utf-8")
    try:
        write_atomically(file, text + " " * (BLOCK_BYTES - len(data) % BLOCK_BYTES) + " " * BLOCK_BYTES)
    except OSError as error:
        file.with_name(f".{file.name}.{os.getpid()}.tmp").unlink(missing_ok=True)
        if not is_out_of_space(error) or len(data) > (size := file.stat().st_size):
            raise
        with file.open("r+b") as out:
            out.write(data.ljust(size))
            out.flush()
            os.fsync(out.fileno())


def write_durably(file: Path, text: str) -> None:
    """As `write_atomically`, and on the disk when it returns: it outlives the machine's end, not only the process's."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    with partial.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    partial.replace(file)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_private(file: Path, text: str) -> None:
    """Write a file that nobody else may read, at no moment."""
    file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(text)
