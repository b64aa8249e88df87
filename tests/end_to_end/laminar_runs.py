"""Runs under test: start them as processes, read their state, and check that they leave nothing behind."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from temporary_folder import unexpected_in

from infra.processes import is_running
from pipelines.inspect.run_files import CONFIG_FILE

REPOSITORY = Path(__file__).parents[2]
SLOW_S = 60.0


class CommandServer:
    """Starts `laminar` commands from a process that has imported all modules, see command_server.py.

    `temporary` is the temporary directory of the commands.
    """

    def __init__(self, model: Path, temporary: Path) -> None:
        self.temporary = temporary
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).with_name("command_server.py")), str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(temporary), "TERM": "xterm-256color"},
        )
        self._response()

    def start(self, arguments: Sequence[str], folder: Path, output: Path) -> int:
        return int(self._request({"arguments": list(arguments), "folder": str(folder), "output": str(output)}))

    def exit_code(self, pid: int) -> int | None:
        code = self._request({"wait": pid})
        return None if code is None else int(code)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()

    def _request(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._response()

    def _response(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


class Command:
    """A `laminar` command as a process; its descendants are found by its working directory `here`."""

    def __init__(self, command_server: CommandServer, here: Path, *arguments: str, output: Path | None = None) -> None:
        self.here, self.output_file = here, output or here / "output.txt"
        self.server = command_server
        self._code: int | None = None
        here.mkdir(parents=True, exist_ok=True)
        self.pid = command_server.start(arguments, here, self.output_file)

    def exit_code(self) -> int | None:
        """The exit code; None while it runs."""
        if self._code is None:
            self._code = self.server.exit_code(self.pid)
        return self._code

    def wait(self, seconds: float = 120.0) -> int:
        """Wait for the end; returns the exit code."""
        deadline = time.monotonic() + seconds
        while (code := self.exit_code()) is None:
            if time.monotonic() > deadline:
                raise AssertionError(f"the command has not ended after {seconds:g} s, {self.evidence()}")
            time.sleep(0.02)
        return code

    def until(self, condition: Callable[[], Any], seconds: float, what: str) -> Any:
        """Wait until `condition` is true and return its value. Otherwise raise an error with the command's output."""
        deadline = time.monotonic() + seconds
        while True:
            used = -time.thread_time()
            is_over = self.exit_code() is not None or time.monotonic() > deadline
            if found := condition():  # read after the exit code: the last that the command does counts, too
                return found
            if is_over:
                raise AssertionError(f"{what}: timed out; exit code {self._code}, {self.evidence()}")
            # One that reads a topic would otherwise take a core from the run.
            time.sleep(min(0.5, 0.02 + 4 * (used + time.thread_time())))

    def signal(self, number: int) -> None:
        """Send a signal, unless the exit code is known: then no process has this id."""
        if self._code is None:
            os.kill(self.pid, number)

    def output(self) -> str:
        return self.output_file.read_text() if self.output_file.exists() else ""

    def evidence(self) -> str:
        """What the command has printed."""
        return f"output:\n{self.output()}"

    def processes(self) -> list[psutil.Process]:
        """The live processes in the working directory: the command and its descendants."""
        return [process for process in psutil.process_iter() if _runs_in(process, self.here)]

    def clean_up(self) -> None:
        """Kill all its processes."""
        kill_processes_in([self.here])


class LaminarRun(Command):
    """`laminar run`."""

    def __init__(self, command_server: CommandServer, here: Path, config: Path, name: str, *changes: str) -> None:
        self.name = name
        self.folder = here / "runs" / name
        self._temporary_before = set(command_server.temporary.iterdir())
        sets = [argument for change in changes for argument in ("--set", change)]
        super().__init__(command_server, here, "run", str(config), "--name", name, *sets)

    def resume(self, *changes: str, options: Sequence[str] = ()) -> None:
        """Resume the run after it has ended: `laminar runs resume`."""
        sets = [argument for change in changes for argument in ("--set", change)]
        self.start_again("runs", "resume", "--run", self.name, *sets, *options)

    def start_again(self, *words: str) -> None:
        """Resume the run with the command `laminar WORDS`."""
        self._code = None
        self.pid = self.server.start(words, self.here, self.output_file)
        self.until(lambda: self.state().get("pid") == self.pid, 120, "resumed run")

    def state(self) -> dict[str, Any]:
        """The content of state.json; empty before it exists."""
        try:
            return dict(json.loads((self.folder / "state.json").read_text()))
        except FileNotFoundError:
            return {}

    def evidence(self) -> str:
        """What the command has printed, the ends of its logs, and the stacks of its roles' and broker's threads."""
        roles = self.role_pids() if "roles" in self.state() else []
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                if process.pid in roles:
                    process.send_signal(signal.SIGUSR1)
                elif process.name() == "java":
                    process.send_signal(signal.SIGQUIT)
        time.sleep(0.5)
        files = [*sorted((self.folder / "logs").glob("*.log")), *(self.folder / "kafka").glob("broker.log")]
        logs = [f"{file.name}:\n{file.read_text(errors='replace')[-20_000:]}" for file in files]
        return "\n".join((super().evidence(), *logs))

    def until_phase(self, phase: str, seconds: float = 150.0) -> None:
        """Wait until the run has entered `phase`; "starting" is the start of its roles, after its checks, or later.

        A warning shows the evidence once it has taken longer than SLOW_S: what stalls and goes on is to be explained.
        """
        slow_at = time.monotonic() + SLOW_S

        def entered() -> bool:
            nonlocal slow_at
            if time.monotonic() > slow_at:
                slow_at = math.inf
                warnings.warn(f"slow: phase {phase!r} takes more than {SLOW_S:g} s, {self.evidence()}", stacklevel=2)
            state = self.state()
            if phase == "starting":  # the first phase has this name, too
                return "checks" in state.get("phases", ()) and (
                    state["phase"] in (phase, "training") or "training" in state["phases"]
                )
            return bool(state) and phase in (state["phase"], *state["phases"])

        self.until(entered, seconds, f"phase {phase!r}")

    def pid_of(self, role: str, seconds: float = 120.0) -> int:
        """The process id of `role`, once it has a process."""
        return int(self.until(lambda: self.state().get("roles", {}).get(role, {}).get("pid"), seconds, f"role {role}"))

    def broker_pid(self) -> int:
        return int(json.loads((self.folder / "kafka" / "broker.json").read_text())["pid"])

    def role_pids(self) -> list[int]:
        """The process ids of the roles that have a process."""
        return [role["pid"] for role in self.state()["roles"].values() if role["pid"]]

    def zygote_pid(self) -> int:
        """The parent process of the live roles."""
        return int(self.until(self._zygote_pid, 120, "zygote"))

    def _zygote_pid(self) -> int | None:
        for role in self.role_pids():
            try:
                parent = psutil.Process(role).parent()
                if parent is not None and parent.ppid() == self.pid:
                    return parent.pid
            except psutil.NoSuchProcess:
                continue
        return None

    def audit(self) -> dict[str, Any]:
        """The content of audit.json."""
        return dict(json.loads((self.folder / "audit.json").read_text()))

    def checkpoints(self) -> list[Path]:
        """Its complete checkpoints."""
        return list((self.folder / "checkpoints").glob("*.*/checkpoint.json"))

    def weights(self) -> list[Path]:
        """The weight versions in its store."""
        return list(self.weights_folder().glob("*.safetensors"))

    def weights_folder(self) -> Path:
        """The folder of its weight store: runs of other folders may have the same name."""
        saved = self.folder / CONFIG_FILE
        return Path(tomllib.loads(saved.read_text())["relay"]["store"] if saved.exists() else self.folder / "weights")

    def temporary_files(self) -> list[Path]:
        """What is in the temporary directory of commands and was not there when the run was started."""
        return sorted({*unexpected_in(self.server.temporary)} - self._temporary_before)

    def leftovers(self) -> list[str]:
        """Processes and files of the run that are left outside its folder."""
        found = [f"{process.pid} {' '.join(_command(process))[:80]}" for process in self.processes()]
        found += [str(store) for store in [self.weights_folder()] if store.exists()]
        found += map(str, self.temporary_files())
        address = self.state().get("bootstrap_servers", "")
        if (self.folder / "kafka").exists() and address and _listens(address):
            found.append(f"a broker at {address}")
        return found

    def seconds_until_gone(self, within: float) -> float:
        """Wait until nothing is left of the run; returns the seconds. Raises AssertionError after `within` seconds."""
        started = time.monotonic()
        while leftovers := self.leftovers():
            if time.monotonic() - started > within:
                raise AssertionError(f"after {within:g} s these are left: {'; '.join(leftovers)}")
            time.sleep(0.05)
        return time.monotonic() - started


def kill_processes_in(folders: Iterable[Path]) -> None:
    """Kill every process whose working directory is in `folders`, and wait until they have ended."""
    wanted, killed = set(map(str, folders)), list[psutil.Process]()
    for process in psutil.process_iter():
        try:
            if process.cwd() in wanted:
                process.kill()
                killed.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    while any(map(is_running, killed)):
        time.sleep(0.01)


def _runs_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, int(port))) == 0


StartRun = Callable[..., LaminarRun]
"""Starts a run with a name and changes to a configuration, by default the small one: the fixture `start_run`."""
