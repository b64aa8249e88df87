"""A verifier process: reads attempts, answers with values, and bounds what a verifier may use up.

The limits are rlimits on address space, CPU, file size, descriptors and processes, and an audit hook for what rlimits
cannot stop (they do not bind root's forks). They catch mistakes and accidents; they are no sandbox against malice.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from operators.score.attempt import Attempt, Extraction, extract_answer
from operators.score.frames import read_frame, write_frame
from operators.score.rewards import Judge, make_judge

MAX_REPLY_BYTES = 4096
_MAX_ERROR_LETTERS = 500
_FILE_BYTES = 16 * 1024 * 1024
_DESCRIPTORS = 256
_PR_SET_PDEATHSIG = 1
_STARTS_PROCESSES = frozenset(
    {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn", "subprocess.Popen"}
)


def main(parent: int) -> None:
    """Serve the process `parent` on standard input and output until it closes them."""
    die_with(parent)
    requests, replies = os.dup(0), os.dup(1)
    with open(os.devnull, "r+b", buffering=0) as nowhere:  # what a verifier prints must not mix with replies
        for descriptor in (0, 1, 2):
            os.dup2(nowhere.fileno(), descriptor)
    setup = read_frame(requests)
    limit_memory_and_files(setup["memory_limit_mb"])
    try:
        judges = [make_judge(reward["name"], reward["options"]) for reward in setup["rewards"]]
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's module may raise anything
        write_frame(replies, {"error": describe(error)})
        return
    if not setup["allow_processes"]:
        forbid_processes()
    write_frame(replies, {"ready": True})
    serve(requests, replies, judges, Extraction(*setup["extraction"]), setup["time_limit_s"])


def serve(requests: int, replies: int, judges: list[Judge], extraction: Extraction, time_limit_s: float) -> None:
    """Judge one attempt after the other until the requests end."""
    while True:
        try:
            request = read_frame(requests)
        except EOFError:
            return
        limit_cpu(time_limit_s)
        retire = False
        try:
            attempt = read_attempt(request["attempt"], extraction)
            reply: dict[str, Any] = {"value": judges[request["reward"]](attempt)}
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - so may a verifier
            reply = {"error": describe(error)}
            retire = isinstance(error, MemoryError)
        # A thread left behind could spoil later calls.
        retire = retire or threading.active_count() > 1
        write_frame(replies, {**reply, "call": request["call"], "retire": retire})
        if retire:
            os._exit(0)


def read_attempt(fields: Mapping[str, Any], extraction: Extraction) -> Attempt:
    """The attempt that came as JSON, its answer extracted here, where a pattern can do no harm."""
    reference = json.loads(fields["reference"])
    if not isinstance(reference, dict):
        raise ValueError("the reference is no JSON object")
    text = fields["text"]
    return Attempt(
        text, extract_answer(text, extraction), fields["tokens"], fields["prompt"], fields["task"], reference
    )


def describe(error: BaseException) -> str:
    """`error` in a line: its class, its words, and where in the verifier it arose."""
    place, trace = "", error.__traceback__
    while trace is not None:
        place = f" ({os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno})"
        trace = trace.tb_next
    try:
        words = str(error)
    except Exception as second:  # noqa: BLE001 - so may an exception's own __str__
        words = f"its message cannot be read: {type(second).__name__}"
    words = words.encode("ascii", "backslashreplace").decode()
    return f"{type(error).__name__}: {words[:_MAX_ERROR_LETTERS]}{place}"


def die_with(parent: int) -> None:
    """End this process as soon as `parent` ends, however it does (Linux; elsewhere at the end of the requests)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it was asked about
        os._exit(0)


def limit_memory_and_files(memory_limit_mb: int) -> None:
    """Bound address space, file sizes and descriptors, and leave no core files."""
    lower_limit(resource.RLIMIT_AS, memory_limit_mb * 1024 * 1024)
    lower_limit(resource.RLIMIT_FSIZE, _FILE_BYTES)
    lower_limit(resource.RLIMIT_NOFILE, _DESCRIPTORS)
    lower_limit(resource.RLIMIT_CORE, 0)


def limit_cpu(seconds: float) -> None:
    """Bound the CPU time from now on: the last resort where the pool itself cannot act."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(usage.ru_utime + usage.ru_stime + seconds) + 1, hard))


def lower_limit(which: int, value: int) -> None:
    """Set a soft and hard limit, never above the hard one in force."""
    _, hard = resource.getrlimit(which)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(which, (value, value))


def forbid_processes(audit: Callable[[Any], None] = sys.addaudithook) -> None:
    """Make starting a process an error. For good: an audit hook cannot be taken back."""

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _STARTS_PROCESSES:
            raise PermissionError("verifiers must not start processes (set allow_processes = true to let them)")

    audit(refuse)
    lower_limit(resource.RLIMIT_NPROC, 0)
