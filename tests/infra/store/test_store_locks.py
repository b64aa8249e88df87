"""Locks on files whose names may go while one waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.store import locks


@pytest.mark.parametrize("change", [Path.unlink, lambda path: (path.unlink(), path.touch())], ids=["gone", "replaced"])
def test_who_waited_for_a_file_that_is_no_more_gets_no_lock(tmp_path: Path, change: Callable[[Path], object]) -> None:
    path = tmp_path / "file"
    path.touch()
    alone = locks.try_lock_exclusive(path)
    assert alone is not None
    raised: list[Exception] = []

    def wait() -> None:
        try:
            locks.lock_shared(path)
        except FileNotFoundError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    change(path)
    alone.release()
    waiting.join(5)
    assert len(raised) == 1


def test_many_share_and_one_takes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    first, second = locks.lock_shared(path), locks.lock_shared(path)
    first.release()
    first.release()
    assert locks.try_lock_exclusive(path) is None
    second.release()
    alone = locks.try_lock_exclusive(path)
    assert alone is not None
    assert locks.try_lock_exclusive(path) is None
    alone.release()
