"""Killing the processes of a run, one after the other."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator

import psutil
from laminar_runs import LaminarRun

ROLES = ("prompts", "placement", "rollout-0", "score", "experience", "trainer", "evaluation", "relay-0")
BROKER = "broker"


def kill(run: LaminarRun, name: str) -> None:
    """Kill the process `name` of `run` and return once another is in its place."""
    if name == BROKER:
        before = run.broker_pid()
        os.kill(before, signal.SIGKILL)
        run.until(lambda: run.broker_pid() != before and psutil.pid_exists(run.broker_pid()), 60, "another broker")
        return
    before = run.pid_of(name)
    os.kill(before, signal.SIGKILL)
    run.until(lambda: run.state()["roles"][name]["pid"] not in (None, before), 60, f"another {name}")


def rounds(seed: int) -> Iterator[str]:
    """Names of all processes in random order, again and again; a broker now and then, for it takes long."""
    rng = random.Random(seed)
    while True:
        order = [*ROLES, BROKER]
        rng.shuffle(order)
        yield from order
