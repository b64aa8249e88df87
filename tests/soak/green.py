"""Runs `make test` N times and records every result, to show that the suite passes repeatedly.

    .venv/bin/python tests/soak/green.py --folder build/soak/green

By default ten runs of the checked-out commit, three of them in random order with two busy loops as load. Each result is
saved to `results.json` in the folder as soon as the run ends, beside a file with its output; run again, it continues
with the missing runs. Results of other commits are kept, but do not count. Exit code 1 unless all runs of this commit
passed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from infra.files import write_atomically  # noqa: E402

Found = dict[str, Any]
SUMMARY = re.compile(r"(FAILED|ERROR) (tests/\S+)")


def main() -> None:
    """Run the missing runs, print the table."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--folder", type=Path, required=True, help="the folder of results.json and outputs")
    arguments.add_argument("--runs", type=int, default=10)
    arguments.add_argument("--hard", type=int, default=3, help="how many of the runs are in random order, under load")
    arguments.add_argument("--loops", type=int, default=2, help="busy loops during a hard run")
    arguments.add_argument(
        "--pytest", default="", metavar="ARGS", help="additional arguments of pytest, such as `-k kafka`"
    )
    options = arguments.parse_args()
    commit = _git("rev-parse", "--short", "HEAD") + ("+changes" if _git("status", "--porcelain") else "")
    results = green(options.folder.absolute(), commit, options)
    show(commit, results)
    sys.exit(any(found["exit_code"] for found in results.values()))


def green(folder: Path, commit: str, options: argparse.Namespace) -> dict[str, Found]:
    """The results of every run of `commit`, by number; the last `options.hard` are the hard ones."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "results.json"
    results: dict[str, Found] = json.loads(file.read_text()) if file.exists() else {}
    names = {f"{commit}/{n}": n >= options.runs - options.hard for n in range(options.runs)}
    for name, hard in names.items():
        if name not in results:
            output = folder / f"{name.replace('/', '-')}.txt"
            results[name] = run(output, hard, options)
            write_atomically(file, json.dumps(results, indent=1))
            print(f"{name}: {results[name]}", flush=True)
    return {name: results[name] for name in names}


def run(output: Path, hard: bool, options: argparse.Namespace) -> Found:
    """One `make test`, with its output in `output`."""
    seed = random.randrange(1_000_000)
    arguments = ["-rfEs", *options.pytest.split(), *([f"--shuffle={seed}"] if hard else [])]
    started = time.monotonic()
    with busy_loops(options.loops if hard else 0), output.open("w") as out:
        done = subprocess.run(
            ["make", "test", f"ARGS={' '.join(arguments)}"], cwd=REPOSITORY, stdout=out, stderr=out, check=False
        )
    failed = sorted({match[2] for match in SUMMARY.finditer(output.read_text(errors="replace"))})
    return {
        "exit_code": done.returncode,
        "seconds": round(time.monotonic() - started),
        "order": f"shuffled by {seed}" if hard else "as written",
        "busy_loops": options.loops if hard else 0,
        "failed": failed,
    }


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


def show(commit: str, results: dict[str, Found]) -> None:
    """Print one row per run."""
    table = Table("run", "result", "seconds", "order", "busy loops", "failed", title=f"make test at {commit}")
    for name, found in results.items():
        result = "FAILED" if found["exit_code"] else "green"
        failed = "\n".join(found["failed"])
        table.add_row(name, result, str(found["seconds"]), found["order"], str(found["busy_loops"]), failed)
    Console().print(table)


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    main()
