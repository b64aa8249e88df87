"""Explores histories: draws them from seeds, plays them, and shortens those that fail."""

from __future__ import annotations

import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from infra.json_text import decode_json
from infra.simulation.scheduler import EndlessLoop
from infra.simulation.streams import Streams
from pipelines.simulate.configurations import (
    RELAYS,
    SHAPE_WEIGHTS,
    SHAPES,
    TRAINER_APART,
    configuration,
    has_goal,
    resharded_role,
    wiring,
)
from pipelines.simulate.faults import Fault, draw_faults
from pipelines.simulate.world import FAULTS_UNTIL_S, SimulatedHistory, World

MAX_PLAYS = 120
"""How many histories are played, at most, to shorten one."""
MAX_CPU_S = 60.0
"""The CPU time of a history, at most: it takes about a second."""


def draw_history(seed: int, shapes: Sequence[str] = ()) -> SimulatedHistory:
    """The history of a seed, with a shape of `shapes` (default: any). The same seed gives the same history."""
    shape = Streams(seed).choose("shape", {name: SHAPE_WEIGHTS.get(name, 1.0) for name in shapes or SHAPES})
    roles = [each.role.name for each in wiring(shape)]
    drawn = draw_faults(seed, roles, FAULTS_UNTIL_S)
    config = configuration(shape)
    absent = {
        "extend_run": not has_goal(shape),
        "reshard_run": resharded_role(config) is None,
        "change_ranks": config.trainer.shares == 1,
    }
    faults = tuple(fault for fault in drawn if not absent.get(fault.kind))
    return SimulatedHistory(seed, shape, faults)


def play(history: SimulatedHistory, **options: Any) -> SimulatedHistory:
    """Play a history that has been drawn, or read from a file; `options` are those of World.

    An error of the simulation itself is its failure.
    """
    fresh = SimulatedHistory(history.seed, history.shape, history.faults)
    shape = history.shape
    relays, apart = RELAYS.get(shape, 0), shape in TRAINER_APART
    world = World(configuration(shape), wiring(shape), fresh, relays=relays, trainer_apart=apart, **options)
    try:
        with _cpu_limit():
            return world.run()
    except Exception as error:  # noqa: BLE001 - the other histories are played, and this one is saved
        where = traceback.extract_tb(error.__traceback__)[-1]
        fresh.failure = f"the simulation ended with {type(error).__name__} in {where.name}: {error}"
        return fresh
    finally:
        world.close()


@contextmanager
def _cpu_limit() -> Iterator[None]:
    """Raise EndlessLoop, in the step that runs, after MAX_CPU_S seconds of CPU time; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(number: int, frame: FrameType | None) -> None:
        where = "" if frame is None else f" in {frame.f_code.co_qualname}"
        raise EndlessLoop(f"a history has taken {MAX_CPU_S:g} s of CPU time{where}")

    before = signal.signal(signal.SIGVTALRM, expire)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_S, MAX_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def explore(seeds: Sequence[int], shapes: Sequence[str] = ()) -> Iterator[SimulatedHistory]:
    """Play the histories of `seeds`, in order."""
    for seed in seeds:
        yield play(draw_history(seed, shapes))


def shrink(history: SimulatedHistory, run: Callable[[SimulatedHistory], SimulatedHistory] = play) -> SimulatedHistory:
    """The history with as few faults as still make it fail in the same way, found by leaving out parts of its list.

    `history` has failed.
    """
    best, plays, kind = history, 0, kind_of_failure(history.failure)
    size = max(1, len(best.faults) // 2)
    while plays < MAX_PLAYS:
        shorter = _without(best.faults, size)
        for faults in shorter:
            plays += 1
            tried = run(replace(best, faults=faults))
            if tried.failure is not None and kind_of_failure(tried.failure) == kind:
                best = tried
                size = min(size, max(1, len(best.faults) // 2))
                break
            if plays >= MAX_PLAYS:
                break
        else:
            if size == 1:
                break
            size //= 2
        if not best.faults:
            break
    return best


def kind_of_failure(failure: str | None) -> str:
    """The part of a failure that is the same for other trajectories, numbers and lists."""
    text = re.sub(r"\b[a-z]?\d[\d.]*", "#", failure or "")
    return re.sub(r"^\S+: ", "", text).partition(":")[0]  # without the name of a trajectory or a shard


def _without(faults: tuple[Fault, ...], size: int) -> Iterator[tuple[Fault, ...]]:
    """`faults` without `size` consecutive ones, at each place."""
    for first in range(0, len(faults), size):
        yield faults[:first] + faults[first + size :]


def to_json(history: SimulatedHistory) -> dict[str, Any]:
    """The history as JSON values, from which `read_history` plays it again."""
    return {
        "seed": history.seed,
        "shape": history.shape,
        "faults": [fault.to_json() for fault in history.faults],
        "failure": history.failure,
        "ended_s": round(history.ended_s, 3),
        "requests": history.requests,
        "records": history.records,
        "digest": history.digest,
    }


def read_history(file: Path) -> SimulatedHistory:
    """The history that a file describes. Raises ValueError naming what is wrong with it, OSError."""
    try:
        value = decode_json(file.read_bytes())
        faults = tuple(Fault.from_json(each) for each in value["faults"])
        history = SimulatedHistory(int(value["seed"]), str(value["shape"]), faults)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{file} is not a history of `laminar simulate`: {error}") from error
    known = {each.role.name for each in wiring(history.shape)}
    for fault in history.faults:
        if fault.role not in known:
            raise ValueError(f"{file}: there is no role {fault.role!r} in shape {history.shape!r}")
    return history
