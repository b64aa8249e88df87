"""Atomic, durable and private writing of files, files with secrets, and checks of free disk space."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

BLOCK_BYTES = 4096
"""Bytes of a disk block."""
MIN_FREE_BYTES = 16 * 1024 * 1024
"""A disk with fewer free bytes is considered full: a log segment of a broker does not fit."""


def is_out_of_space(error: BaseException | None) -> bool:
    """Whether `error` or its cause is a write that failed because of a full disk or a quota."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


def describe_free_space(path: Path) -> str:
    """The free space of the disk on which `path` is or would be, as text."""
    while not path.exists() and path != path.parent:
        path = path.parent
    usage = shutil.disk_usage(path)
    return f"{usage.free:,} of {usage.total:,} bytes are free on the disk of {path}"


def is_full(path: Path) -> bool:
    """Whether the disk of `path` is full; False if `path` does not exist."""
    try:
        return shutil.disk_usage(path).free < MIN_FREE_BYTES
    except OSError:
        return False


class NoHomeDirectory(RuntimeError):
    """This user has no home directory. The message names the variables to set."""


def user_cache() -> Path:
    """The folder of what is fetched or built once per user. Raises NoHomeDirectory."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "laminar"
    except RuntimeError as error:
        raise NoHomeDirectory("this user has no home directory: set HOME or XDG_CACHE_HOME") from error


def access_error(path: Path) -> str:
    """Why this user cannot know whether `path` exists, such as "Permission denied"; empty if they can."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


PRIVATE_UMASK = 0o077
UMASK_VARIABLE = "LAMINAR_UMASK"
"""The environment variable with an octal umask such as "022"; without it files are private to their owner."""


def keep_files_private() -> None:
    """Make files written by this process and its children private, or as `UMASK_VARIABLE` says. Raises ValueError."""
    value = os.environ.get(UMASK_VARIABLE)
    try:
        umask = PRIVATE_UMASK if not value else int(value, 8)
        if not 0 <= umask <= 0o777:
            raise ValueError
    except ValueError:
        raise ValueError(f'{UMASK_VARIABLE} must be an octal umask such as "022", not {value!r}') from None
    os.umask(umask)


def write_atomically(file: Path, text: str) -> None:
    """Write `text` to `file` atomically: a reader sees the old content or the new, never a part."""
    with replacing(file) as out:
        out.write(text)


@contextmanager
def replacing(file: Path) -> Iterator[TextIO]:
    """A text file that becomes `file` at the end of this context; after an error `file` is as it was before."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with partial.open("w", encoding="utf-8") as out:
            yield out
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def write_even_if_disk_full(file: Path, text: str) -> None:
    """As `write_atomically`; on a full disk overwrite `file` in place. Spaces are appended to `text`.

    During an overwrite a reader may see a part. Raises OSError if the blocks of `file` are too few; `BLOCK_BYTES` of
    spaces are kept for growth.
    """
    data = text.encode("utf-8")
    try:
        write_atomically(file, text + " " * (BLOCK_BYTES - len(data) % BLOCK_BYTES) + " " * BLOCK_BYTES)
    except OSError as error:
        if not is_out_of_space(error) or len(data) > (size := file.stat().st_size):
            raise
        with file.open("r+b") as out:
            out.write(data.ljust(size))
            out.flush()
            os.fsync(out.fileno())


def write_durably(file: Path, text: str) -> None:
    """As `write_atomically`, and durable when it returns: it survives a crash of the machine."""
    with replacing(file) as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    sync_path(file.parent)


def sync_path(path: Path) -> None:
    """Flush the file at `path`, or the entries of the folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_private(file: Path, text: str) -> None:
    """Write a file that is readable by its owner only, from its creation on."""
    file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        out.write(text)


MIN_SECRET_CHARACTERS = 16


def create_secret(file: Path) -> None:
    """Write a random secret to `file`, readable by its owner only; an existing file is kept. Any process may be first.

    Raises OSError.
    """
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}.") as partial:  # of mode 0600
        partial.write(secrets.token_hex(32) + "\n")
        partial.flush()
        with suppress(FileExistsError):  # another process or thread was first
            os.link(partial.name, file)


def read_secret(file: Path) -> str:
    """The secret in the first line of `file`. Raises ValueError if there is none, or one that is too short."""
    try:
        text = file.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not text:
        raise ValueError(f"{file} has no secret in its first line")
    if len(text) < MIN_SECRET_CHARACTERS:
        raise ValueError(
            f"the secret in {file} has {len(text)} characters, it must have at least {MIN_SECRET_CHARACTERS}: "
            f"create one with `openssl rand -hex 32 > {file}`"
        )
    return text


def sha256_of(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` at the end of the `with` block, and is removed after an error.

    Raises FileExistsError if `path` exists and is not an empty folder, or is the present one.
    """
    path = path.resolve()
    if path.exists() and (not path.is_dir() or any(path.iterdir()) or path == Path.cwd()):
        raise FileExistsError(f"{path} exists already: choose another folder, or remove it")
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
