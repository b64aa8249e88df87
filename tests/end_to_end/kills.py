"""Kills the processes of a run, one after the other."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Sequence

import psutil
from laminar_runs import LaminarRun

ROLES = ("prompts", "placement", "rollout-0", "score", "experience", "trainer", "evaluation", "relay-0")
BROKER = "broker"
ZYGOTE = "zygote"
ALL = (*ROLES, BROKER, ZYGOTE)


def kill(run: LaminarRun, name: str) -> None:
    """Kill the process `name` of `run` and return once it is replaced.

    The roles die with the zygote, so all of them are replaced too.
    """
    if name == ZYGOTE:
        pids = set(run.role_pids())
        os.kill(run.zygote_pid(), signal.SIGKILL)
        run.until(lambda: len(run.role_pids()) == len(pids) and pids.isdisjoint(run.role_pids()), 120, "other roles")
        return
    if name == BROKER:
        before = run.broker_pid()
        os.kill(before, signal.SIGKILL)
        run.until(lambda: run.broker_pid() != before and psutil.pid_exists(run.broker_pid()), 120, "another broker")
        return
    before = run.pid_of(name)
    os.kill(before, signal.SIGKILL)
    run.until(lambda: run.state()["roles"][name]["pid"] not in (None, before), 120, f"another {name}")


def rounds(seed: int, names: Sequence[str] = ALL) -> Iterator[str]:
    """Endless rounds of `names` (default: all processes), each in random order."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(names, len(names))
