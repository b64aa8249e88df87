"""Late requests in every role, and faults on a cluster; each cell is a run.

    .venv/bin/python tests/soak/fault_campaign.py --folder build/soak/faults

By default 25 late requests per role (300 in total) and 110 faults. The result of a cell is saved to `results.json` in
the folder as soon as it ends; run again, the campaign continues with missing and failed cells. Exit code 1 if any cell
failed. Cluster cells need root, for network namespaces; without it they are skipped, with a note.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from faults.cluster_run import BROKERS, ROLES, survive  # noqa: E402
from faults.late_run import any_late_request, late_requests_in_every_role  # noqa: E402
from faults.nemesis import KINDS  # noqa: E402
from faults.network import NoNetwork  # noqa: E402
from faults.proxied_broker import proxied_broker  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from infra.files import write_atomically  # noqa: E402
from infra.runners.role_logging import configure_logging  # noqa: E402

Found = dict[str, Any]
TRIES, FAULTS = 5, 11
"""Late requests per role in a cell, and faults in a cell."""


def late_requests(folder: Path, seed: int) -> Found:
    """TRIES late requests in each role: any transactional request, delivered at any of the next points."""
    with proxied_broker(folder / "kafka") as kafka:
        found = late_requests_in_every_role(kafka, f"late-{seed}", folder, TRIES, any_late_request(seed))
        assert not found.anomalies, found.anomalies
        assert not found.stalled, found.stalled
        return {"tries": found.tries, "apis": found.apis, "answers": found.answers, "batches": found.batches}


def cluster_faults(folder: Path, seed: int) -> Found:
    """FAULTS faults on three brokers and the hosts of the roles, every kind at least once."""
    rng = random.Random(seed)
    kinds = [*KINDS, *(rng.choice(KINDS) for _ in range(FAULTS - len(KINDS)))]
    rng.shuffle(kinds)
    hosts = [rng.choice([*BROKERS, *ROLES]) for _ in kinds]
    survived = survive(folder, f"cluster-{seed}", seed, zip(kinds, hosts, strict=True))
    assert not survived.anomalies, survived.anomalies
    return {
        "faults": [vars(fault) for fault in survived.faults],
        "batches": survived.batches,
        "restarts": survived.restarts,
        "recovered_s": survived.recovered_s,
    }


def main() -> None:
    """Run the missing cells, print the tables."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--folder", type=Path, required=True, help="the folder of runs and results.json")
    arguments.add_argument("--late", type=int, default=5, help=f"cells of {TRIES} late requests a role")
    arguments.add_argument("--cluster", type=int, default=10, help=f"cells of {FAULTS} faults on a cluster")
    options = arguments.parse_args()
    configure_logging()
    logging.getLogger().setLevel(logging.ERROR)  # lost sessions are expected
    cells = {f"late requests/{n}": partial(late_requests, seed=n) for n in range(options.late)}
    cells |= {f"cluster faults/{n}": partial(cluster_faults, seed=n) for n in range(options.cluster)}
    results = campaign(options.folder.absolute(), cells)
    show({name: results[name] for name in cells})
    sys.exit(any("error" in found for found in results.values()))


def campaign(folder: Path, cells: dict[str, Callable[[Path], Found]]) -> dict[str, Found]:
    """The result of each cell; cells that passed, by `results.json` in `folder`, are not run again."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "results.json"
    results: dict[str, Found] = json.loads(file.read_text()) if file.exists() else {}
    for name, cell in cells.items():
        if {"error", "skipped"} & results.get(name, {"error": "not run"}).keys():
            results[name] = _run(cell, folder / name.replace("/", "-").replace(" ", "-"))
            write_atomically(file, json.dumps(results, indent=1))
            print(f"{name}: {results[name]}", flush=True)
    return results


def _run(cell: Callable[[Path], Found], here: Path) -> Found:
    """Run `cell` in the new folder `here`, which is kept after a failure."""
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    started = time.monotonic()
    try:
        found = cell(here)
    except AssertionError as error:
        return {"error": str(error)[:4000], "seconds": round(time.monotonic() - started)}
    except NoNetwork as reason:
        found = {"skipped": str(reason)}
    shutil.rmtree(here)
    return {**found, "seconds": round(time.monotonic() - started)}


def show(results: dict[str, Found]) -> None:
    """Print the late requests by role, every fault with its effect, and one row per cell."""
    tries: Counter[str] = Counter()
    faults = Table("cell", "fault", "target", "seconds", "measured effect", title="Faults on the cluster")
    cells = Table("cell", "result", "batches", "seconds", "note", title="Cells")
    for name, found in results.items():
        tries.update(found.get("tries", {}))
        for fault in found.get("faults", []):
            faults.add_row(name, fault["kind"], fault["target"], f"{fault['seconds']}", fault["effect"])
        result = "FAILED" if "error" in found else "skipped" if "skipped" in found else "ok"
        note = found.get("error") or found.get("skipped") or ""
        cells.add_row(name, result, str(found.get("batches", "")), str(found["seconds"]), note[:300])
    late = Table("role", "late requests", title=f"Late requests: {tries.total()} in total")
    for role, count in sorted(tries.items()):
        late.add_row(role, str(count))
    console = Console()
    for table in (late, faults, cells):
        console.print(table)
    console.print(f"{sum(len(found.get('faults', [])) for found in results.values())} faults on the cluster")


if __name__ == "__main__":
    main()
