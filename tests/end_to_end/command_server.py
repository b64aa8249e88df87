"""A process with all modules imported, which forks `laminar` commands, so that tests do not wait for imports.

It serves JSON lines: `{"arguments": [...], "folder": ..., "output": ...}` starts a command in that folder with its
output in that file, and returns its process id; `{"wait": pid}` returns its exit code, or null while it runs. The only
difference to a command at a terminal: the zygote of a run is forked from this process, too.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from typing import IO, Any, NoReturn

import pipelines.run.zygote_process
from infra.quiet_libraries import quiet_libraries
from infra.runners.garbage_collection import collect_rarely, reduce_gc_frequency
from pipelines.cli.main import COMMANDS
from pipelines.cli.main import main as laminar
from pipelines.run.zygote import import_role_modules
from pipelines.run.zygote import main as zygote


class ForkedZygote:
    """The part of subprocess.Popen that ZygoteProcess uses."""

    def __init__(self, log: IO[bytes]) -> None:
        commands, commands_out = os.pipe()
        events_in, events = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            sys.argv = ["laminar"]
            run_forked(lambda: zygote(), commands, events, log.fileno())
        os.close(commands)
        os.close(events)
        self.stdin, self.stdout = os.fdopen(commands_out, "wb"), os.fdopen(events_in, "rb")
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or 3600.0)
        while self._code is None:
            self._code = exit_code(self.pid)
            if self._code is None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("zygote", timeout or 0.0)
            time.sleep(0.02)
        return self._code

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)


def run_forked(target: Any, *descriptors: int) -> NoReturn:
    """Run `target` in this forked process: own session, `descriptors` as standard input, output and error."""
    code = 1
    try:
        os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.closerange(3, 1024)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP):  # the parent of the test process may ignore them
            signal.signal(number, signal.SIG_DFL)
        target()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001 - the last frame of a process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def start(arguments: list[str], folder: str, output: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.chdir(folder)
    file = os.open(output, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOCTTY, 0o644)
    pipelines.run.zygote_process.start_zygote = lambda log, model: ForkedZygote(log)  # type: ignore[assignment,return-value]
    sys.argv = ["laminar", *arguments]  # as at a terminal: signals after a run's end are ignored
    run_forked(laminar, file if os.isatty(file) else os.open(os.devnull, os.O_RDONLY), file, file)


def exit_code(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def main() -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    collect_rarely()
    quiet_libraries()
    import_role_modules(sys.argv[1])
    for module in (*(command.module for command in COMMANDS.values()), "pipelines.run.local"):
        importlib.import_module(module)
    reduce_gc_frequency()
    logging.getLogger().handlers.clear()  # Beam's import adds one, and commands that import less have none
    respond(os.getpid())
    while select.select([0], [], [])[0]:
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # skips seconds of interpreter shutdown
        request = json.loads(line)
        respond(exit_code(request["wait"]) if "wait" in request else start(**request))


def respond(response: Any) -> None:
    os.write(1, json.dumps(response).encode() + b"\n")


if __name__ == "__main__":
    main()
