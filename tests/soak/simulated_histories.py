"""Plays histories of failures without end or up to a count: python tests/soak/simulated_histories.py [--count 20000].

A process on each core plays them (`--jobs`). The next seed is kept in the folder, with a hash of the code that
histories run: an interrupted campaign of the same code continues, and changed code begins again at seed 0. A failing
history is shortened and saved there; `laminar simulate --replay FILE --timeline` shows it. Exits with 1 if one has
failed with this code.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.results import code_hash, loaded_code  # noqa: E402
from infra.files import write_atomically  # noqa: E402
from pipelines.simulate.configurations import SHAPES  # noqa: E402
from pipelines.simulate.explore import draw_history, play, shrink, to_json  # noqa: E402

REPORT_EVERY = 100


def simulated_code() -> str:
    """A hash of the code that histories run: a history of each shape has loaded it."""
    for shape in SHAPES:
        play(draw_history(0, [shape]))
    gc.freeze()  # what is loaded stays: collections of histories need not visit it
    return code_hash(*loaded_code())


def play_seed(seed: int) -> tuple[float, dict[str, Any] | None]:
    """The CPU seconds of the history of `seed`; and the shortened history if it failed."""
    logging.disable(logging.CRITICAL)
    began = time.process_time()
    history = play(draw_history(seed))
    failing = None if history.failure is None else to_json(shrink(history))
    return time.process_time() - began, failing


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--count", type=int, default=20_000)
    options.add_argument("--folder", type=Path, default=Path("build/soak/simulated"))
    options.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes, default one a core")
    arguments = options.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.CRITICAL)
    file, code = arguments.folder / "histories.json", simulated_code()
    done = json.loads(file.read_text()) if file.exists() else {}
    if done.get("code") != code:
        done = {"code": code, "seeds": 0, "wall_seconds": 0.0, "cpu_seconds": 0.0, "failed": []}
    began, before = time.monotonic(), done["wall_seconds"]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        try:
            seeds = range(done["seeds"], arguments.count)
            for seed, (cpu_seconds, failing) in zip(seeds, pool.map(play_seed, seeds), strict=True):
                done["seeds"], done["wall_seconds"] = seed + 1, before + time.monotonic() - began
                done["cpu_seconds"] += cpu_seconds
                if failing is not None:
                    write_atomically(arguments.folder / f"failing-{seed}.json", json.dumps(failing, indent=1))
                    done["failed"].append([seed, failing["failure"]])
                    print(f"seed {seed}: {failing['failure']}", flush=True)
                if (seed + 1) % REPORT_EVERY == 0 or failing is not None or seed + 1 == arguments.count:
                    write_atomically(file, json.dumps(done))
                    print(
                        f"{seed + 1} histories, {len(done['failed'])} failed, "
                        f"{(seed + 1) / done['wall_seconds'] * 3600:,.0f} an hour with {arguments.jobs} processes, "
                        f"{(seed + 1) / done['cpu_seconds'] * 3600:,.0f} an hour of CPU time",
                        flush=True,
                    )
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return 1 if done["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
