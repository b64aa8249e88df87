"""One decoder under atheris (libFuzzer), in its own process: `target.py NAME COUNTER CORPUS [libFuzzer's flags]`.

COUNTER is a file of eight bytes with the number of inputs run, valid also after a crash.
"""

from __future__ import annotations

import mmap
import struct
import sys
from pathlib import Path

import atheris

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1]), str(HERE.parents[2])]

INSTRUMENTED = ["schemas", "infra", "operators", "pipelines", "json", "tomllib"]

with atheris.instrument_imports(include=INSTRUMENTED):
    from decoders import DECODERS


def main() -> None:
    """Run until libFuzzer ends."""
    name, counter, corpus, *flags = sys.argv[1:]
    decoder = DECODERS[name]
    with open(counter, "r+b") as file:
        counted = mmap.mmap(file.fileno(), 8)
    done = struct.unpack("<Q", counted[:8])[0]

    def feed(data: bytes) -> None:
        nonlocal done
        done += 1
        counted[:8] = struct.pack("<Q", done)
        decoder.check(data)

    with atheris.instrument_imports(include=INSTRUMENTED):  # of what only this decoder needs
        seeds = decoder.seeds()
    for number, seed in enumerate(seeds):
        (Path(corpus) / f"seed-{number}").write_bytes(seed)
    atheris.Setup([sys.argv[0], *flags, corpus], feed)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
