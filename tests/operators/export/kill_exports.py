"""Kills exports: `python kill_exports.py FOLDER KILLS` prints kills, how often the export progressed, and problems."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from export_factories import end_of, export, exported_to, polled

from operators.export.folder import ExportFolder
from operators.export.verify import verify


def forked(work: Callable[[], None]) -> int:
    pid = os.fork()
    if not pid:
        code = 1
        try:
            work()
            code = 0
        except (AssertionError, RuntimeError, OSError, ValueError) as error:
            sys.stderr.write(f"{error!r}\n")
        finally:
            os._exit(code)
    return pid


def export_forever(folder: Path) -> None:
    """Export for ever, in small files of a few records, from the end of the folder on."""
    exporting = export(folder, [], file_bytes=1)
    first = end_of(folder)
    while True:
        exporting.fold(polled(first, 3))
        first += 4


def check(folder: Path) -> None:
    proof = verify(folder)
    assert not proof.problems, proof.problems


def main(folder: Path, kills: int) -> None:
    chance = random.Random(0)
    ended_at, moved = 0, 0
    assert os.waitpid(forked(lambda: exported_to(folder, [polled(0, 3, last=True)])), 0)[1] == 0
    for number in range(kills):
        pid = forked(lambda: export_forever(folder))
        while number % 2 and end_of(folder) == ended_at:  # the others are killed at any time, also before they write
            assert os.waitpid(pid, os.WNOHANG) == (0, 0)
            time.sleep(0.01)
        time.sleep(0.05 + 0.1 * chance.random())
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert os.waitpid(forked(lambda: check(folder)), 0)[1] == 0
        moved += end_of(folder) > ended_at
        ended_at = end_of(folder)
    assert os.waitpid(forked(lambda: ExportFolder(folder).close()), 0)[1] == 0
    print(json.dumps([kills, moved, len(verify(folder).problems)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
