"""Fuzzes every decoder, guided by coverage, and prints a table; run again, it continues where it stopped.

    python tests/fuzz/campaign.py --folder build/soak/fuzz [--inputs 10000000] [--least 100000] [--seconds 3600]

An input that crashes, hangs (`HANG_S`) or takes more than `MEMORY_MB` is saved in FOLDER/NAME/found, and that decoder
is not fuzzed further; the exit code is then 1. `rm -r FOLDER` starts over.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1]), str(HERE.parents[2])]

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

HANG_S = 10
MEMORY_MB = 2048
TURN = 100_000
"""Inputs per process: a new process releases the memory of the old interpreter."""
LONGEST = 16_384
_HUNG = 70
"""libFuzzer's exit code for a hang; other codes are crashes and too much memory."""
_PEAK = re.compile(r"rss: (\d+)Mb")


@dataclass
class FuzzResult:
    """The inputs of a decoder so far, and their results; memory is the maximum of all processes, in MB."""

    inputs: int = 0
    crashes: int = 0
    hangs: int = 0
    memory_mb: int = 0
    seconds: float = 0.0
    found: list[str] = field(default_factory=list)


def main() -> None:
    """Fuzz the decoders and print the table; exit with 1 after any finding."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("build/soak/fuzz"))
    parser.add_argument("--inputs", type=int, default=10_000_000, help="inputs of all decoders together")
    parser.add_argument("--least", type=int, default=100_000, help="minimum inputs per decoder")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop after this time; run again to continue"
    )
    parser.add_argument("--turn", type=int, default=TURN)
    parser.add_argument("--only", nargs="+")
    options = parser.parse_args()
    names = options.only or decoder_names()
    results, end = read(options.folder, names), time.monotonic() + options.seconds
    while (name := next_of(results, options.inputs, options.least)) is not None and time.monotonic() < end:
        fuzz(name, results[name], options.folder, options.turn, max(1.0, end - time.monotonic()))
        write(options.folder, results)
    show(results, options.inputs, options.least)
    sys.exit(1 if any(each.crashes or each.hangs for each in results.values()) else 0)


def decoder_names() -> list[str]:
    """The names of all decoders."""
    from decoders import DECODERS

    return list(DECODERS)


def next_of(results: dict[str, FuzzResult], inputs: int, least: int) -> str | None:
    """The next decoder: the one with the fewest inputs, then with the least time; None when all have enough."""
    short = [name for name, result in results.items() if result.inputs < least and not result.found]
    if short:
        return min(short, key=lambda name: results[name].inputs)
    if sum(result.inputs for result in results.values()) >= inputs:
        return None
    clean = [name for name, result in results.items() if not result.found]
    return min(clean, key=lambda name: results[name].seconds) if clean else None


def fuzz(name: str, result: FuzzResult, folder: Path, turn: int, seconds: float) -> None:
    """Fuzz `name` for one turn in its own process."""
    home = folder / name.replace(" ", "-").replace("'", "")
    corpus, found, counter = home / "corpus", home / "found", home / "counter"
    for each in (corpus, found):
        each.mkdir(parents=True, exist_ok=True)
    counter.write_bytes(struct.pack("<Q", 0))
    flags = [
        f"-runs={turn}",
        f"-max_total_time={max(1, int(min(seconds, 1 << 30)))}",
        f"-timeout={HANG_S}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-max_len={LONGEST}",
        f"-artifact_prefix={found}/",
        "-print_final_stats=1",
    ]
    command = [sys.executable, str(HERE.with_name("target.py")), name, str(counter), str(corpus), *flags]
    began = time.monotonic()
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    with (home / "log").open("w+b") as log:
        code = subprocess.run(command, stdout=log, stderr=log, env=environment, check=False).returncode
        log.seek(0)
        output = log.read().decode(errors="replace")
    result.seconds += time.monotonic() - began
    result.inputs += struct.unpack("<Q", counter.read_bytes())[0]
    result.memory_mb = max([result.memory_mb, *map(int, _PEAK.findall(output))])
    result.found = sorted(path.name for path in found.iterdir())
    result.hangs += code == _HUNG
    result.crashes += code not in (0, _HUNG)
    if code:
        result.found = result.found or [f"exit code {code}, see {home / 'log'}"]
        print(f"{name}: exit code {code}\n{output[-1500:]}", file=sys.stderr)


def read(folder: Path, names: Sequence[str]) -> dict[str, FuzzResult]:
    """The results of an earlier campaign in `folder`; decoders with findings are fuzzed again."""
    file = folder / "results.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    return {name: FuzzResult(**{**known.get(name, {}), "found": []}) for name in names}


def write(folder: Path, results: dict[str, FuzzResult]) -> None:
    """Save `results`, and keep those of other decoders."""
    file, partial = folder / "results.json", folder / ".results.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    partial.write_text(json.dumps(known | {name: asdict(result) for name, result in results.items()}, indent=1))
    partial.replace(file)


def show(results: dict[str, FuzzResult], inputs: int, least: int) -> None:
    """Print the table."""
    table = Table(title=f"Coverage-guided fuzzing of decoders; goal: {inputs:,} inputs, at least {least:,} each")
    for column in ("decoder", "inputs", "per second", "crashes", "hangs", "memory, MB"):
        table.add_column(column, justify="left" if column == "decoder" else "right")
    for name, result in results.items():
        pace = f"{result.inputs / result.seconds:,.0f}" if result.seconds else "-"
        table.add_row(name, f"{result.inputs:,}", pace, str(result.crashes), str(result.hangs), str(result.memory_mb))
    total = [sum(getattr(result, each) for result in results.values()) for each in ("inputs", "crashes", "hangs")]
    table.add_row("all", f"{total[0]:,}", "", str(total[1]), str(total[2]), "", style="bold")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
