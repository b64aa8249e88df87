"""Plants each defect of tests/pipelines/simulate/mutations.py, and counts the histories until the simulation finds it.

    python tests/soak/simulated_mutations.py [--most 1000] [--only NAME …] [--folder build/soak/simulated]

A defect is found by a history that fails with it and passes without it. Results of the present code are kept in the
folder: an interrupted campaign continues. Exits with 1 if a defect is not found, or its patch does not fit the code.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MUTATIONS_FOLDER = ROOT / "tests/pipelines/simulate"
sys.path[:0] = [str(ROOT), str(MUTATIONS_FOLDER)]

from mutations import MUTATIONS, Mutation  # noqa: E402
from simulated_histories import simulated_code  # noqa: E402

from infra.files import write_atomically  # noqa: E402
from pipelines.simulate.explore import draw_history, play  # noqa: E402
from pipelines.simulate.world import SimulatedHistory  # noqa: E402

STALE = re.compile(r"ended with (TypeError|AttributeError|NameError|ImportError)\b")
"""Errors of a patch that does not fit the code any more. They show nothing about the simulation."""


def failure_with(mutation: Mutation, history: SimulatedHistory) -> str | None:
    """How `history` fails with the defect; None if it passes."""
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        return play(history).failure


def histories_until_found(mutation: Mutation, most: int) -> tuple[int | None, str]:
    """The number of histories until one fails by the defect, and how it fails; None if none of `most` does.

    A history counts if it passes without the defect. A stale patch is not found.
    """
    for seed in range(most):
        failure = failure_with(mutation, draw_history(seed))
        if failure is None:
            continue
        if STALE.search(failure):
            return None, f"the patch is stale: {failure}"
        if play(draw_history(seed)).failure is None:
            return seed + 1, failure
        print(f"seed {seed} fails without the defect, too: it does not count", flush=True)
    return None, ""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--most", type=int, default=1000)
    options.add_argument("--only", nargs="*", default=list(MUTATIONS), choices=list(MUTATIONS))
    options.add_argument("--folder", type=Path, default=Path("build/soak/simulated"))
    arguments = options.parse_args()
    logging.disable(logging.CRITICAL)
    file, code = arguments.folder / "mutations.json", simulated_code()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    found = json.loads(file.read_text()) if file.exists() else {}
    if found.get("code") != code:
        found = {"code": code}
    for name in arguments.only:
        if name not in found:
            began = time.process_time()
            count, failure = histories_until_found(MUTATIONS[name], arguments.most)
            calm = failure_with(MUTATIONS[name], SimulatedHistory(0, "plain", ())) is not None
            seconds = time.process_time() - began
            found[name] = {"histories": count, "cpu_seconds": seconds, "failure": failure, "fails_calm": calm}
            write_atomically(file, json.dumps(found, indent=1))
        row = found[name]
        count, calm = row["histories"] or "NOT FOUND", "calm, too" if row["fails_calm"] else ""
        print(f"{name:52} {count:>9} {row['cpu_seconds']:7.1f} s  {calm:9}  {row['failure'][:100]}", flush=True)
    return 0 if all(found[name]["histories"] for name in arguments.only) else 1


if __name__ == "__main__":
    sys.exit(main())
