"""Plays histories of failures without end or up to a count: python tests/soak/simulated_histories.py [--count 20000].

The next seed is kept in the folder: an interrupted campaign continues. A failing history is shortened and saved there;
`laminar simulate --replay FILE --timeline` shows it. Exits with 1 if one has failed.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from pipelines.simulate.explore import draw_history, play, shrink, to_json  # noqa: E402

REPORT_EVERY = 100


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--count", type=int, default=20_000)
    options.add_argument("--folder", type=Path, default=Path("build/soak/simulated"))
    arguments = options.parse_args()
    logging.disable(logging.CRITICAL)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    file = arguments.folder / "histories.json"
    done = json.loads(file.read_text()) if file.exists() else {"seeds": 0, "cpu_seconds": 0.0, "failed": []}
    while done["seeds"] < arguments.count:
        began = time.process_time()
        history = play(draw_history(done["seeds"]))
        if history.failure is not None:
            failing = shrink(history)
            (arguments.folder / f"failing-{history.seed}.json").write_text(json.dumps(to_json(failing), indent=1))
            done["failed"].append([history.seed, failing.failure])
            print(f"seed {history.seed}: {failing.failure}", flush=True)
        done["seeds"] += 1
        done["cpu_seconds"] += time.process_time() - began
        if done["seeds"] % REPORT_EVERY == 0 or history.failure is not None:
            file.write_text(json.dumps(done))
            print(
                f"{done['seeds']} histories, {len(done['failed'])} failed, "
                f"{done['seeds'] / done['cpu_seconds'] * 3600:,.0f} an hour of CPU time",
                flush=True,
            )
    return 1 if done["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
