"""Runs `make test`, or another target, N times and records every result, to show that the suite passes repeatedly.

    make green                        # .venv/bin/python tests/soak/green.py
    make green ARGS=--show            # the results so far
    make flink-green                  # with --target flink-test --hard 0: another target, in a folder of its own

By default ten runs of the checked-out commit, the first three in random order with two busy loops as load, since those
find most. A line is printed after each run, and a table at the end. The folder keeps `results.json` and the output of
each run; an interrupted command continues with the missing runs. Results of other commits are kept, but do not count. A
run leaves no process, no shared memory and no file, otherwise it failed. Exit code 1 unless all runs of this commit
passed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

import psutil  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.results import checked_out  # noqa: E402
from infra.files import write_atomically  # noqa: E402

SOAK = REPOSITORY / "build" / "soak"
TARGET = "test"
SHARED_MEMORY = Path("/dev/shm")
SUMMARY = re.compile(r"(?:FAILED|ERROR) (tests/\S+)")


@dataclass(frozen=True)
class Result:
    """The result of one run; `left` names processes and shared memory that it left."""

    exit_code: int
    seconds: int
    order: str
    busy_loops: int
    failed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def green(self) -> bool:
        return self.exit_code == 0 and not self.left

    def line(self) -> str:
        """The result in one line."""
        loops = f", {self.busy_loops} busy loops" if self.busy_loops else ""
        found = [*self.failed, *(f"left {each}" for each in self.left)]
        named = f": {', '.join(found)}" if found else ""
        minutes = f"{self.seconds // 60}:{self.seconds % 60:02}"
        return f"{'green' if self.green else 'FAILED'} in {minutes} min, {self.order}{loops}{named}"


def main() -> None:
    """Run the missing runs, print the table."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--target", default=TARGET, help="the target of `make`, by default test")
    arguments.add_argument(
        "--folder", type=Path, help="the folder of results.json and outputs, by default build/soak/green[-TARGET]"
    )
    arguments.add_argument("--runs", type=int, default=10)
    arguments.add_argument("--hard", type=int, default=3, help="how many of the runs are in random order, under load")
    arguments.add_argument("--loops", type=int, default=2, help="busy loops during a hard run")
    arguments.add_argument("--show", action="store_true", help="only print the results so far")
    arguments.add_argument(
        "--pytest", default="", metavar="ARGS", help="additional arguments of pytest, such as `-k kafka`"
    )
    options = arguments.parse_args()
    folder, commit = (options.folder or default_folder(options.target)).absolute(), checked_out()
    plan = {f"{commit}/{n}": options.loops if n < options.hard else 0 for n in range(options.runs)}
    if not options.show:
        try:
            run_missing(folder, plan, options.pytest.split(), ("make", options.target))
        except KeyboardInterrupt:
            print("interrupted: the same command continues", flush=True)
            sys.exit(130)
        except CommitChanged as error:
            sys.exit(str(error))
    results = {name: result for name, result in read_results(folder).items() if name in plan}
    show(commit, options.target, results)
    sys.exit(not (len(results) == len(plan) and all(result.green for result in results.values())))


def default_folder(target: str) -> Path:
    """The folder of the results of `target`: runs of different targets do not count for each other."""
    return SOAK / ("green" if target == TARGET else f"green-{target}")


class CommitChanged(RuntimeError):
    """The working tree changed during a run, so its result belongs to no commit."""


def run_missing(
    folder: Path, plan: dict[str, int], pytest: Sequence[str] = (), command: Sequence[str] = ("make", "test")
) -> None:
    """Do each run of `plan`, the number of busy loops by name, that has no result yet.

    Raises CommitChanged, without a result, if the working tree changed during the run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = checked_out()
    for number, (name, loops) in enumerate(plan.items(), 1):
        results = read_results(folder)
        if name not in results:
            result = run(folder / f"{name.replace('/', '-')}.txt", loops, pytest, command)
            if (now := checked_out()) != before:
                raise CommitChanged(f"run {number} does not count: the working tree is at {now}, and was at {before}")
            results[name] = result
            file = folder / "results.json"
            write_atomically(file, json.dumps({key: asdict(each) for key, each in results.items()}, indent=1))
        print(f"run {number} of {len(plan)}: {results[name].line()}", flush=True)


def read_results(folder: Path) -> dict[str, Result]:
    """The results so far, of every commit."""
    file = folder / "results.json"
    return {name: Result(**each) for name, each in json.loads(file.read_text()).items()} if file.exists() else {}


def run(output: Path, loops: int, pytest: Sequence[str], command: Sequence[str]) -> Result:
    """One run of `command`, with its output in `output`; it has random order and load if there are busy loops."""
    seed = random.randrange(1_000_000)
    arguments = ["-rfEs", *pytest, *([f"--shuffle={seed}"] if loops else [])]
    memory, started = set(os.listdir(SHARED_MEMORY)), time.monotonic()
    temporary = Path(tempfile.mkdtemp(prefix="laminar-green-"))  # names all that belongs to this run
    try:
        with busy_loops(loops), output.open("w") as out:
            code = execute([*command, f"ARGS={' '.join(arguments)}"], {**os.environ, "TMPDIR": str(temporary)}, out)
        left = [f"{each.pid} {' '.join(each.cmdline())[:100]}" for each in processes_of(temporary)]
        left += sorted(f"/dev/shm/{name}" for name in set(os.listdir(SHARED_MEMORY)) - memory if "laminar" in name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Result(
        code,
        round(time.monotonic() - started),
        f"shuffled by {seed}" if loops else "as written",
        loops,
        sorted(set(SUMMARY.findall(output.read_text(errors="replace")))),
        left,
    )


def execute(command: Sequence[str], environment: dict[str, str], out: object) -> int:
    """Run `command` in a process group of its own, which ends with this call for any reason."""
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=out, stderr=out, env=environment, process_group=0)  # type: ignore[call-overload]
    try:
        return int(process.wait())
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def processes_of(folder: Path) -> Iterator[psutil.Process]:
    """The live processes that work in `folder`, or whose command names it."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            text = " ".join([process.cwd(), *process.cmdline()])
            if str(folder) in text and process.status() != psutil.STATUS_ZOMBIE:
                yield process


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run `count` busy processes during the block."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def show(commit: str, target: str, results: dict[str, Result]) -> None:
    """Print one row per run."""
    table = Table("run", "result", "seconds", "order", "busy loops", "failed", title=f"make {target} at {commit}")
    for name, found in results.items():
        what = "\n".join([*found.failed, *(f"left {each}" for each in found.left)])
        row = (name, "green" if found.green else "FAILED", str(found.seconds), found.order, str(found.busy_loops), what)
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    main()
