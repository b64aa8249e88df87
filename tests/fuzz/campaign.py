"""Feeds every decoder by coverage-guided fuzzing, prints a table, and goes on where it was when it is started again.

    python tests/fuzz/campaign.py --folder build/soak/fuzz [--inputs 10000000] [--least 100000] [--seconds 3600]

An input that crashes, hangs (`HANG_S`) or takes more than `MEMORY_MB` is kept in FOLDER/NAME/found, and that decoder is
fed no more; the exit code is then 1. `rm -r FOLDER` begins anew.
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
"""Inputs that one process runs: a new one gives back what an interpreter keeps."""
LONGEST = 16_384
_HUNG = 70
"""What libFuzzer exits with after a hang; other codes are crashes and too much memory."""
_PEAK = re.compile(r"rss: (\d+)Mb")


@dataclass
class Fed:
    """What a decoder has been fed so far, and what came of it; memory is the most of any process, in MB."""

    inputs: int = 0
    crashes: int = 0
    hangs: int = 0
    memory_mb: int = 0
    seconds: float = 0.0
    found: list[str] = field(default_factory=list)


def main() -> None:
    """Feed all of them and print the table; exit with 1 where anything was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("build/soak/fuzz"))
    parser.add_argument("--inputs", type=int, default=10_000_000, help="in all")
    parser.add_argument("--least", type=int, default=100_000, help="of each decoder")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many; go on another time")
    parser.add_argument("--turn", type=int, default=TURN)
    parser.add_argument("--only", nargs="+")
    told = parser.parse_args()
    names = told.only or decoder_names()
    results, end = read(told.folder, names), time.monotonic() + told.seconds
    while (name := next_of(results, told.inputs, told.least)) is not None and time.monotonic() < end:
        feed(name, results[name], told.folder, told.turn, max(1.0, end - time.monotonic()))
        write(told.folder, results)
    show(results, told.inputs, told.least)
    sys.exit(1 if any(each.crashes or each.hangs for each in results.values()) else 0)


def decoder_names() -> list[str]:
    """The names of all decoders."""
    from decoders import DECODERS

    return list(DECODERS)


def next_of(results: dict[str, Fed], inputs: int, least: int) -> str | None:
    """Who is fed next: whoever has least, then the quickest, until all have had enough; None: nobody."""
    short = [name for name, fed in results.items() if fed.inputs < least and not fed.found]
    if short:
        return min(short, key=lambda name: results[name].inputs)
    if sum(fed.inputs for fed in results.values()) >= inputs:
        return None
    clean = [name for name, fed in results.items() if not fed.found]
    return min(clean, key=lambda name: results[name].seconds) if clean else None


def feed(name: str, fed: Fed, folder: Path, turn: int, seconds: float) -> None:
    """Give `name` a turn in a process of its own."""
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
        said = log.read().decode(errors="replace")
    fed.seconds += time.monotonic() - began
    fed.inputs += struct.unpack("<Q", counter.read_bytes())[0]
    fed.memory_mb = max([fed.memory_mb, *map(int, _PEAK.findall(said))])
    fed.found = sorted(path.name for path in found.iterdir())
    fed.hangs += code == _HUNG
    fed.crashes += code not in (0, _HUNG)
    if code:
        fed.found = fed.found or [f"exit code {code}, see {home / 'log'}"]
        print(f"{name}: exit code {code}\n{said[-1500:]}", file=sys.stderr)


def read(folder: Path, names: Sequence[str]) -> dict[str, Fed]:
    """What an earlier campaign in `folder` has come to; what it found is tried again."""
    file = folder / "results.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    return {name: Fed(**{**known.get(name, {}), "found": []}) for name in names}


def write(folder: Path, results: dict[str, Fed]) -> None:
    """Keep what has come of it so far, beside what decoders that are not in `results` have come to."""
    file, partial = folder / "results.json", folder / ".results.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    partial.write_text(json.dumps(known | {name: asdict(fed) for name, fed in results.items()}, indent=1))
    partial.replace(file)


def show(results: dict[str, Fed], inputs: int, least: int) -> None:
    """Print the table."""
    table = Table(title=f"Decoders under coverage-guided fuzzing; the aim is {inputs:,} inputs, {least:,} of each")
    for column in ("decoder", "inputs", "a second", "crashes", "hangs", "memory, MB"):
        table.add_column(column, justify="left" if column == "decoder" else "right")
    for name, fed in results.items():
        pace = f"{fed.inputs / fed.seconds:,.0f}" if fed.seconds else "-"
        table.add_row(name, f"{fed.inputs:,}", pace, str(fed.crashes), str(fed.hangs), str(fed.memory_mb))
    total = [sum(getattr(fed, each) for fed in results.values()) for each in ("inputs", "crashes", "hangs")]
    table.add_row("all", f"{total[0]:,}", "", str(total[1]), str(total[2]), "", style="bold")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
