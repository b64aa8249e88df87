"""The zygote: one process that has imported everything, from which a run's roles are forked, and their guardian.

Importing Beam and torch takes seconds of CPU; forked roles share it, and a role that is restarted is back at once. The
zygote speaks JSON lines: `{"guard": folder, "scratch": folder}`, `{"start": name, ...}` and
`{"signal": name, "number": n}` in, `{"started": name, "pid": n}` and `{"ended": name, "code": n}` out. When its input
ends (`laminar run` is gone, however it went) it stops every role and removes the weight store and the temporary
directory that it guards. When it is killed, its roles die with it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from pipelines.roles import CANNOT_RUN, EMULATED, PIPELINES, WITH_MODEL

GRACE_S = 3.5
"""How long roles may take to drain before they are killed."""
_TICK_S = 0.05
_TRAINING = (
    "infra.models.checkpoint_folder",
    "infra.models.demo",
    "operators.rollout.transformers_backend",
    "operators.trainer.train_batches",
    "pipelines.run.warm_start",
    "reasoning_gym",
    *(f"pipelines.{pipeline}" for pipeline in PIPELINES),
)
_EMULATION = (
    "operators.rollout.emulated_backend",
    *(f"pipelines.{pipeline}" for pipeline in PIPELINES if pipeline not in WITH_MODEL),
)
_PR_SET_PDEATHSIG = 1
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    """Serve until standard input ends. The first argument is the folder of the model that roles will load, if known."""
    commands, events = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # nothing but events goes to the supervisor
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)  # they are the supervisor's to heed, which drains in order
    import_everything("".join(sys.argv[1:]))
    _Zygote(commands, events).serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # taking down all that was imported takes two seconds, in which the run seems not to have gone


def import_everything(model: str = "") -> None:
    """What roles import sooner or later, each module once for all of them, the code of the model in `model` too."""
    emulated = model == EMULATED
    for module in _EMULATION if emulated else _TRAINING:
        importlib.import_module(module)
    if model and not emulated:
        importlib.import_module("infra.models.preload").preload_model_code(Path(model))
    # A fork copies one thread: a lock that another holds would stay locked in every role.
    if threading.active_count() > 1:
        raise RuntimeError(f"imports started threads: {threading.enumerate()}")


class _Zygote:
    def __init__(self, commands: int, events: int) -> None:
        self._commands, self._events = commands, events
        self._buffer = b""
        self._running: dict[int, str] = {}
        self._store: Path | None = None
        self._scratch: str | None = None

    def serve(self) -> None:
        self._say({"ready": os.getpid()})
        while True:
            readable, _, _ = select.select([self._commands], [], [], _TICK_S)
            if readable:
                data = os.read(self._commands, 65536)
                if not data:
                    break
                *lines, self._buffer = (self._buffer + data).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))
            self._reap()
        self._end()

    def _obey(self, command: Mapping[str, Any]) -> None:
        if "start" in command:
            self._start(command)
        elif "guard" in command:
            self._store, self._scratch = Path(command["guard"]), command["scratch"]
        else:
            for pid, name in self._running.items():
                if name == command["signal"]:
                    os.kill(pid, command["number"])

    def _start(self, command: Mapping[str, Any]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        zygote = os.getpid()
        # A stop that comes before the child has undone our ignoring of it must wait, not be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        try:
            pid = os.fork()
        except OSError as error:
            print(f"cannot start {command['start']}: {error}", file=sys.stderr, flush=True)
            self._say({"ended": command["start"], "pid": 0, "code": os.EX_OSERR})
            return
        finally:
            if os.getpid() == zygote:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        if pid == 0:
            _become_role(command, zygote, (self._commands, self._events), self._scratch)
        self._running[pid] = command["start"]
        self._say({"started": command["start"], "pid": pid})

    def _reap(self) -> None:
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            name = self._running.pop(pid, None)
            if name is not None:
                self._say({"ended": name, "pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _say(self, event: Mapping[str, Any]) -> None:
        with suppress(BrokenPipeError):  # the supervisor is gone; the end of our input says so too
            os.write(self._events, json.dumps(event).encode() + b"\n")

    def _end(self) -> None:
        for pid in self._running:
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while self._running and time.monotonic() < deadline:
            self._reap()
            time.sleep(_TICK_S)
        for pid in self._running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        from infra.store.ownership import remove_store

        if self._store is not None:
            remove_store(self._store, in_use=True)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


def _become_role(command: Mapping[str, Any], zygote: int, pipes: Sequence[int], scratch: str | None) -> NoReturn:
    """Be the role from here on. Whatever happens, the process ends here and never goes on as a second zygote."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != zygote:
            os._exit(1)  # it died before the kernel knew that we go with it
        for pipe in pipes:
            os.close(pipe)
        os.setpgrp()
        log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        for number in _STOPS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        if scratch is not None:
            os.environ["TMPDIR"] = tempfile.tempdir = scratch
        code = _live(command)
    except BaseException:  # noqa: BLE001 - the last frame of a process: whatever it is goes to its log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _live(command: Mapping[str, Any]) -> int:
    """What a role does; its exit code."""
    from infra.kafka.log_gaps import CannotResume
    from operators.prompts.question import SourceError
    from operators.trainer.persist import CheckpointError
    from pipelines.config import ConfigError, load_config
    from pipelines.roles import Role, configure_logging, run_role

    configure_logging()
    try:
        config = load_config(Path(command["config"]))
        if command["start"] == "warm-start":
            from pipelines.run.warm_start import make_warm_start

            make_warm_start(config)
        else:
            run_role(config, Role(command["pipeline"], command["index"]))
    except (ConfigError, SourceError, CheckpointError, CannotResume):
        traceback.print_exc()
        return CANNOT_RUN
    finally:
        logging.shutdown()
    return 0


if __name__ == "__main__":
    main()
