"""A worker process that runs the episodes of one environment, one step at a time."""

from __future__ import annotations

import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from infra.workers.error_text import ErrorText
from infra.workers.frames import read_frame, take_channels, write_frame
from infra.workers.limits import die_with, forbid_processes, limit_cpu, limit_memory_and_files
from operators.rollout.environments.contract import EnvironmentKind, LiveEpisode, load_environment

MAX_LIVE_EPISODES = 64
"""The number of live episodes that a process keeps; an evicted one is replayed from its texts."""


def main(parent: int) -> None:
    """Serve the process `parent` until it closes our standard input."""
    die_with(parent)
    requests, replies = take_channels()
    setup, errors = read_frame(requests), ErrorText()
    try:
        limit_memory_and_files(setup["memory_mb"], "memory_mb")
        kind = load_environment(setup["target"], setup["options"])
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's module may raise anything
        write_frame(replies, {"error": errors.describe(error)})
        return
    if not (kind.starts_processes or kind.keeps_threads):
        forbid_processes()
    write_frame(replies, {"ready": True, "stop": kind.stop})
    live: OrderedDict[str, LiveEpisode] = OrderedDict()
    threads = threading.active_count()
    while True:
        try:
            request = read_frame(requests)
        except EOFError:
            return

        steps = itertools.count()

        def begin_step(steps: Iterator[int] = steps, call: int = request["call"]) -> None:
            """Every step has its own time limit, also during a replay."""
            limit_cpu(setup["seconds"])
            if step := next(steps):
                write_frame(replies, {"step": step, "call": call})

        retire = False
        try:
            reply = advance_episode(live, kind, request, setup["max_observation_chars"], begin_step)
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - so may an environment
            live.pop(request["episode"], None)
            reply = {"error": errors.describe(error)}
            retire = isinstance(error, MemoryError)
        # A thread that is left over could corrupt later steps.
        retire = retire or (threading.active_count() > threads and not kind.keeps_threads)
        write_frame(replies, {**reply, "call": request["call"], "retire": retire})
        if retire:
            os._exit(0)


def advance_episode(
    live: OrderedDict[str, LiveEpisode],
    kind: EnvironmentKind,
    request: dict[str, Any],
    max_chars: int,
    begin_step: Callable[[], None],
) -> dict[str, Any]:
    """Run an episode up to the turns of `request`: from its present state, or replayed from the reset.

    `begin_step` is called before the reset and before each turn.
    """
    name, texts = request["episode"], request["texts"]
    episode = live.pop(name, None)
    if episode is None or not episode.is_prefix_of(texts):
        if episode is not None:
            episode.close()
        begin_step()
        episode = LiveEpisode(kind, request["prompt"], max_chars)
    try:
        for text in episode.take_remaining(texts):
            begin_step()
            episode.step(text)
    except BaseException:
        episode.close()
        raise
    if not (episode.state.done or request["last"]):
        live[name] = episode
        if len(live) > MAX_LIVE_EPISODES:
            live.popitem(last=False)[1].close()
    else:
        episode.close()
    return episode.state._asdict()
