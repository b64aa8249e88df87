"""A verifier process: receives attempts and replies with values, within the limits of a worker."""

from __future__ import annotations

import os
import threading
from typing import Any

from infra.workers.error_text import ErrorText
from infra.workers.frames import read_frame, take_channels, write_frame
from infra.workers.limits import die_with, forbid_processes, limit_cpu, limit_memory_and_files
from operators.score.attempt import AnswerContext, Extraction, make_attempt, parse_reference
from operators.score.rewards import Judge, make_judge

MAX_REPLY_BYTES = 4096


def main(parent: int) -> None:
    """Serve the process `parent` on standard input and output until `parent` closes them."""
    die_with(parent)
    requests, replies = take_channels()
    setup = read_frame(requests)
    try:
        limit_memory_and_files(setup["memory_limit_mb"], "score.memory_limit_mb")
        judges = [
            (make_judge(reward["name"], reward["options"]), Extraction(*reward["extraction"]))
            for reward in setup["rewards"]
        ]
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's module may raise anything
        write_frame(replies, {"error": ErrorText().describe(error)})
        return
    if not setup["allow_processes"]:
        forbid_processes()
    write_frame(replies, {"ready": True})
    serve(requests, replies, judges, setup["time_limit_s"])


def serve(requests: int, replies: int, judges: list[tuple[Judge, Extraction]], time_limit_s: float) -> None:
    """Judge one attempt after the other until the requests end; each judge has its own answer extraction."""
    errors = ErrorText()
    while True:
        try:
            request = read_frame(requests)
        except EOFError:
            return
        limit_cpu(time_limit_s)
        retire = False
        try:
            judge, extraction = judges[request["reward"]]
            context = AnswerContext(**request["attempt"])
            attempt = make_attempt(context, parse_reference(context.reference), extraction)
            reply: dict[str, Any] = {"value": judge(attempt)}
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - so may a verifier
            reply = {"error": errors.describe(error)}
            retire = isinstance(error, MemoryError)
        # A thread that a verifier left running could disturb later calls.
        retire = retire or threading.active_count() > 1
        write_frame(replies, {**reply, "call": request["call"], "retire": retire})
        if retire:
            os._exit(0)
