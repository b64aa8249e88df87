"""The zygote: a process with all modules imported, which forks the roles of a run and cleans up after them.

Importing Beam and torch takes seconds of CPU. Forked roles share the imported modules, so a restart is fast. The
protocol is JSON lines. Commands: `{"store": folder, "temporary_folder": folder}`, `{"start": name, ...}` and
`{"signal": name, "number": n}`. Events: `{"ready": pid}`, `{"started": name, "pid": n}`, `{"ended": name, "code": n}`.
When its input ends (`laminar run` has ended or was killed), the zygote stops all roles and removes the weight store and
the temporary folder. When the zygote is killed, the kernel kills its roles.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from infra.escaping import print_escaped
from infra.quiet_libraries import quiet_libraries
from infra.runners.garbage_collection import collect_rarely, reduce_gc_frequency
from pipelines.roles import CANNOT_RUN, EMULATED, PIPELINES, WITH_MODEL
from schemas.hidden_modules import hidden_modules

GRACE_S = 3.5
"""How long roles may drain before they are killed."""
ORPHAN_GRACE_S = 0.5
"""That of the roles of a killed supervisor: a local broker has been killed with it, so most wait in vain."""
_TICK_S = 0.05
_ROLE_MODULES = (
    "apache_beam.runners.portability.fn_api_runner.fn_runner",
    "infra.runners.run",
    "pipelines.branches",
    "pipelines.config",
)
_TRAINING_MODULES = (
    *_ROLE_MODULES,
    "infra.models.checkpoint_folder",
    "infra.models.demo",
    "operators.rollout.model_backend",
    "operators.trainer.train_batches",
    "pipelines.run.warm_start",
    "reasoning_gym",
    *(f"pipelines.{pipeline}" for pipeline in PIPELINES),
)
_EMULATION_MODULES = (
    *_ROLE_MODULES,
    "operators.rollout.emulated_backend",
    *(f"pipelines.{pipeline}" for pipeline in PIPELINES if pipeline not in WITH_MODEL),
)
_PR_SET_PDEATHSIG = 1
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    """Serve commands until standard input ends. The first argument is the folder of the roles' model, if known."""
    commands, events = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # only events go to the supervisor
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the supervisor handles them and drains in order
    collect_rarely()
    quiet_libraries()
    import_role_modules("".join(sys.argv[1:]))
    # Roles share these objects for ever: a collection of a role would copy 150 MB of them, and take half a second.
    reduce_gc_frequency()
    _Zygote(commands, events).serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # skips two seconds of interpreter shutdown, which would delay the end of the run


def import_role_modules(model: str = "") -> None:
    """Import the modules that roles need, and the code of the model in folder `model`."""
    emulated = model == EMULATED
    with hidden_modules():
        importlib.import_module("apache_beam")
    if not emulated:
        defer_imports()
    for module in _EMULATION_MODULES if emulated else _TRAINING_MODULES:
        importlib.import_module(module)
    config = importlib.import_module("pipelines.config").Config
    importlib.import_module("pipelines.config_draft").adapter(config)  # built once, not by each role
    if model and not emulated:
        importlib.import_module("infra.models.checkpoint_folder").preload_model_code(Path(model))
    # A fork copies one thread: a lock that another holds would stay locked in every role.
    if threading.active_count() > 1:
        raise RuntimeError(f"imports started threads: {threading.enumerate()}")


class _Zygote:
    def __init__(self, commands: int, events: int) -> None:
        self._commands, self._events, self._supervisor = commands, events, os.getppid()
        self._buffer = b""
        self._running: dict[int, str] = {}
        self._gateways: set[str] = set()
        self._store: Path | None = None
        self._temporary_folder: str | None = None

    def serve(self) -> None:
        self._emit({"ready": os.getpid()})
        while True:
            readable, _, _ = select.select([self._commands], [], [], _TICK_S)
            if readable:
                data = os.read(self._commands, 65536)
                if not data:
                    break
                *lines, self._buffer = (self._buffer + data).split(b"\n")
                for line in lines:
                    self._execute(json.loads(line))
            self._reap()
        self._end()

    def _execute(self, command: Mapping[str, Any]) -> None:
        if "start" in command:
            self._start(command)
        elif "store" in command:
            self._store, self._temporary_folder = Path(command["store"]), command["temporary_folder"]
        else:
            if command["signal"] in self._gateways:  # it is to end for good
                _release_listener()
            for pid, name in self._running.items():
                if name == command["signal"]:
                    os.kill(pid, command["number"])

    def _start(self, command: Mapping[str, Any]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        zygote = os.getpid()
        if _has_gateway(command):
            self._gateways.add(command["start"])
            _hold_listener(Path(command["config"]))
        # Signals stay pending until the child has restored their handlers; ignored ones would be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        try:
            pid = os.fork()
        except OSError as error:
            print_escaped(f"cannot fork {command['start']}: {error}", err=True)
            self._emit({"ended": command["start"], "pid": 0, "code": os.EX_OSERR})
            return
        finally:
            if os.getpid() == zygote:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
        if pid == 0:
            _become_role(command, zygote, (self._commands, self._events), self._temporary_folder)
        self._running[pid] = command["start"]
        self._emit({"started": command["start"], "pid": pid})

    def _reap(self) -> None:
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            name = self._running.pop(pid, None)
            if name is not None:
                self._emit({"ended": name, "pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _emit(self, event: Mapping[str, Any]) -> None:
        with suppress(BrokenPipeError):  # the supervisor has ended; so has the input
            os.write(self._events, json.dumps(event).encode() + b"\n")

    def _end(self) -> None:
        _release_listener()
        for pid in self._running:
            os.kill(pid, signal.SIGINT)  # after SIGTERM a rollout might first hand its work over
        ending_since = time.monotonic()
        while self._running and time.monotonic() < ending_since + self._grace_s():
            self._reap()
            time.sleep(_TICK_S / 5)
        for pid in self._running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        from infra.store.ownership import remove_store

        if self._store is not None:
            remove_store(self._store, in_use=True)
        if self._temporary_folder is not None:
            shutil.rmtree(self._temporary_folder, ignore_errors=True)

    def _grace_s(self) -> float:
        return GRACE_S if os.getppid() == self._supervisor else ORPHAN_GRACE_S


def _has_gateway(command: Mapping[str, Any]) -> bool:
    return any(pipeline == "gateway" for pipeline, _ in command.get("roles", ()))


def _hold_listener(config_file: Path) -> None:
    """Listen for the run's gateway here, where its kills do not end the socket."""
    from operators.gateway.config import GatewayConfig
    from operators.gateway.serve_agents import hold_listener
    from pipelines.config import load_config
    from pipelines.shards import files_folder

    try:
        config = load_config(config_file)
    except ValueError:
        return  # the gateway reports it
    hold_listener(config.gateway or GatewayConfig(), files_folder(config))


def _release_listener() -> None:
    if (gateway := sys.modules.get("operators.gateway.serve_agents")) is not None:  # else none was held
        gateway.release_listener()


def _become_role(
    command: Mapping[str, Any], zygote: int, pipes: Sequence[int], temporary_folder: str | None
) -> NoReturn:
    """Run the role in this forked process, and exit: it must never continue as a second zygote."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != zygote:
            os._exit(1)  # the zygote died before prctl took effect
        for pipe in pipes:
            os.close(pipe)
        if not _has_gateway(command):
            _release_listener()
        os.setpgrp()
        log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
        if temporary_folder is not None:
            os.environ["TMPDIR"] = tempfile.tempdir = temporary_folder
        code = _run(command)
    except BaseException:  # noqa: BLE001 - last frame of the process: any error goes to its log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(command: Mapping[str, Any]) -> int:
    """Run the role or job of `command`. Returns its exit code."""
    from infra.runners.role_logging import configure_logging
    from pipelines.config import load_config
    from pipelines.roles import Role, RoleProcess, is_permanent, run_process

    configure_logging()
    try:
        config = load_config(Path(command["config"]))
        if command["start"] == "warm-start":
            from pipelines.run.warm_start import make_warm_start

            make_warm_start(config)
        elif command["start"] == "preflight":
            from pipelines.run.trial import run_trial
            from pipelines.run.trial_result import RESULT_FILE

            run_trial(config, config.run_folder / RESULT_FILE)
        else:
            run_process(config, RoleProcess(command["start"], tuple(Role(*each) for each in command["roles"])))
    except Exception as error:
        if not is_permanent(error):
            raise
        traceback.print_exc()
        return CANNOT_RUN
    finally:
        logging.shutdown()
    return 0


UNUSED = ("cellpylib",)


def defer_imports(names: Iterable[str] = UNUSED) -> None:
    """Let imports of these top-level modules find stand-ins, unless they are imported already or not installed."""
    for name in names:
        spec = None if name in sys.modules else importlib.util.find_spec(name)
        if spec is not None:
            sys.modules[name] = DeferredModule(name, spec.origin)


class DeferredModule(ModuleType):
    """Stands for a module until an attribute that it lacks is used, and then imports the module in its place.

    It has `__file__`, which `inspect` reads of every module; importlib's own LazyLoader would import the module then.
    """

    def __init__(self, name: str, origin: str | None) -> None:
        super().__init__(name)
        self.__file__ = origin

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # the path is read to import a module of the package
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


if __name__ == "__main__":
    main()
