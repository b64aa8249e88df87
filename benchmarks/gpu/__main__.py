"""The command; see the package's documentation."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import benchmarks.gpu
from benchmarks.gpu.stand_ins import install_missing

os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
# The last one: a process that has asked CUDA for its GPUs cannot be forked.
_MISSING = install_missing()  # before anything of the weight store is imported

from benchmarks.gpu.machine import scratch_folder  # noqa: E402
from benchmarks.gpu.parts import PARTS, SEVERAL, Outcome, Runner, import_parts  # noqa: E402
from benchmarks.gpu.settings import settings_for  # noqa: E402
from benchmarks.gpu.table import comparisons, render  # noqa: E402

_MODEL_BYTES = 4 << 30


def main() -> int:
    """Measure and print; exit code 1 if a part has no figures or a goal is not reached."""
    description, _, epilog = (benchmarks.gpu.__doc__ or "").partition("\n")
    arguments = argparse.ArgumentParser("benchmarks.gpu", description=description, epilog=epilog)
    arguments.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments.add_argument("--gpus", type=int, default=1, metavar="N", help="ranks over NCCL on N GPUs, instead of one")
    arguments.add_argument("--minutes", type=float, default=8.0, help="the most time that the check takes")
    arguments.add_argument(
        "--only", nargs="+", choices=[part.name for part in (*PARTS, *SEVERAL)], help="these parts alone"
    )
    arguments.add_argument("--results", type=Path, default=Path("build/gpu.json"), help="file for all figures")
    return _check(arguments.parse_args())


def _check(options: argparse.Namespace) -> int:
    deadline = time.monotonic() + 60 * options.minutes
    import_parts()
    runner = Runner(options.device)
    try:
        device = runner.describe(limit=120)
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    settings = settings_for(options.device, int(device["memory"]))
    settings = replace(settings, gpus=options.gpus, start=runner.start_method)
    device |= {"model": settings.shape.name, "stand-ins": _MISSING}
    print(", ".join(f"{name} {value}" for name, value in device.items()), flush=True)
    outcomes: dict[str, Outcome] = {}
    folder = scratch_folder(_MODEL_BYTES if options.device == "cuda" else 1 << 20)
    try:
        for part in PARTS if options.gpus == 1 else SEVERAL:
            if options.only and part.name not in (*options.only, "model"):
                continue
            left = deadline - time.monotonic()
            if left < 10:
                outcomes[part.name] = Outcome(error=f"left out: {options.minutes:g} minutes are over")
                continue
            outcome = runner.run(part, settings, folder / "model", min(part.limit, left))
            if options.device == "cpu" and part.name not in (
                "equality",
                "paths",
                "ranks beside one",
            ):  # a tiny model says nothing about speeds
                outcome.figures = [replace(figure, goal=None) for figure in outcome.figures]
            outcomes[part.name] = outcome
            sys.stderr.write(f"{part.name}: {outcome.error or 'done'} in {outcome.seconds:.0f} s\n")
            _save(options.results, device, outcomes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.device == "cuda":
        outcomes["comparisons"] = Outcome(comparisons(outcomes))
    _save(options.results, device, outcomes)
    print(render(outcomes))
    print(f"all figures: {options.results}")
    bad = any(outcome.error for outcome in outcomes.values())
    return int(bad or any(figure.passed is False for each in outcomes.values() for figure in each.figures))


def _save(file: Path, device: dict[str, Any], outcomes: dict[str, Outcome]) -> None:
    """Write all figures so far: a command that is stopped leaves them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    parts = {name: outcome.as_json() for name, outcome in outcomes.items()}
    file.write_text(json.dumps({"device": device, "parts": parts}, indent=1), "utf-8")


if __name__ == "__main__":
    sys.exit(main())
