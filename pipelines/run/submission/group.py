"""Several processes of one role as one: `laminar submit trainer CONFIG --index 1 --group-size 8` runs ranks 8 to 15.

A container that has several GPUs runs one process for each, which can then exchange data directly. They end together:
a signal goes to all, and when one fails the others are stopped, since they could do nothing without it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence

from infra.runners.liveness import VARIABLE, remove_stale_report

CHECK_S = 0.1
GRACE_S = 50.0
"""Time for the others to end before they are killed; less than a container's."""


def run_group(commands: Sequence[Sequence[str]], numbers: Sequence[int]) -> int:
    """Run `commands` until all have ended; return the first exit code that is not 0.

    Process `numbers[i]` reports its liveness in a file of its own, if the environment names one.
    """
    children: list[subprocess.Popen[bytes]] = []
    stopped: list[int] = []
    reached: set[int] = set()

    def pass_on(number: int, _: object) -> None:
        stopped.append(number)
        for child in children:
            reached.add(child.pid)
            if child.poll() is None:
                child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        environments = [_environment(number) for number in numbers]
        for environment in environments:
            remove_stale_report(environment)
        for command, environment in zip(commands, environments, strict=True):
            if stopped:
                break
            children.append(subprocess.Popen(command, env=environment))
        for child in children:
            if stopped and child.pid not in reached:  # it was being started when the signal came
                child.send_signal(stopped[0])
        return _wait(children, stopped)
    finally:
        for child in children:
            child.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(children: Sequence[subprocess.Popen[bytes]], stopped: Sequence[int]) -> int:
    code, deadline = 0, float("inf")
    while any(child.poll() is None for child in children):
        failed = [child.returncode for child in children if child.poll() not in (None, 0)]
        if failed and not code:
            code, deadline = failed[0], time.monotonic() + GRACE_S
            for child in children:
                if child.poll() is None:
                    child.terminate()
        if time.monotonic() > deadline:
            break
        time.sleep(CHECK_S)
    failed = [child.returncode for child in children if child.returncode]
    return code or (failed[0] if failed and not stopped else 0) or 0


def _environment(number: int) -> dict[str, str]:
    file = os.environ.get(VARIABLE)
    return {**os.environ, **({VARIABLE: f"{file}-{number}"} if file else {})}
