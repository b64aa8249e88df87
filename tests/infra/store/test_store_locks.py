"""File locks, also on files that are removed or replaced while a process waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.store import locks


@pytest.mark.parametrize("change", [Path.unlink, lambda path: (path.unlink(), path.touch())], ids=["gone", "replaced"])
def test_lock_shared_raises_for_a_removed_or_replaced_file(
    tmp_path: Path, change: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.touch()
    exclusive = locks.try_lock_exclusive(path)
    assert exclusive is not None
    raised, opened, made = list[Exception](), threading.Event(), locks.FileLock

    def make(fd: int) -> locks.FileLock:
        opened.set()
        return made(fd)

    monkeypatch.setattr(locks, "FileLock", make)

    def wait() -> None:
        try:
            locks.lock_shared(path)
        except FileNotFoundError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert opened.wait(60)  # else it would open the new file
    waiting.join(0.1)
    assert waiting.is_alive()
    change(path)
    exclusive.release()
    waiting.join(60)
    assert len(raised) == 1


def test_locks_are_shared_or_exclusive(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    first, second = locks.lock_shared(path), locks.lock_shared(path)
    first.release()
    first.release()
    assert locks.try_lock_exclusive(path) is None
    second.release()
    exclusive = locks.try_lock_exclusive(path)
    assert exclusive is not None
    assert locks.try_lock_exclusive(path) is None
    exclusive.release()
