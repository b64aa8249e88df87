"""Plants each defect of tests/pipelines/simulate/mutations.py, and counts the histories until the simulation finds it.

    python tests/soak/simulated_mutations.py [--most 1000] [--only NAME …] [--folder build/soak/simulated]

Results are kept in the folder: an interrupted campaign continues. Exits with 1 if a defect is not found.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/pipelines/simulate")]

from mutations import MUTATIONS, Mutation  # noqa: E402

from pipelines.simulate.explore import draw_history, play  # noqa: E402


def histories_until_found(mutation: Mutation, most: int) -> tuple[int | None, str]:
    """The number of histories until one fails, and how it fails; None if none of `most` does."""
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        for seed in range(most):
            failure = play(draw_history(seed)).failure
            if failure is not None:
                return seed + 1, failure
    return None, ""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--most", type=int, default=1000)
    options.add_argument("--only", nargs="*", default=list(MUTATIONS), choices=list(MUTATIONS))
    options.add_argument("--folder", type=Path, default=Path("build/soak/simulated"))
    arguments = options.parse_args()
    logging.disable(logging.CRITICAL)
    file = arguments.folder / "mutations.json"
    arguments.folder.mkdir(parents=True, exist_ok=True)
    found = json.loads(file.read_text()) if file.exists() else {}
    for name in arguments.only:
        if name not in found:
            began = time.process_time()
            count, failure = histories_until_found(MUTATIONS[name], arguments.most)
            found[name] = {"histories": count, "cpu_seconds": time.process_time() - began, "failure": failure}
            file.write_text(json.dumps(found, indent=1))
        row = found[name]
        count = row["histories"] or "NOT FOUND"
        print(f"{name:52} {count:>9} {row['cpu_seconds']:7.1f} s  {row['failure'][:110]}", flush=True)
    return 0 if all(found[name]["histories"] for name in arguments.only) else 1


if __name__ == "__main__":
    sys.exit(main())
