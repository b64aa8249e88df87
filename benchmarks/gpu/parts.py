"""The parts of the check, each run in a process of its own with a limit of time."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.figures import Figure, figure_of
from benchmarks.gpu.settings import Settings, Shape


class Part(NamedTuple):
    """The function `call`, of the module of that name, takes the settings and the model's folder; `limit` is in s."""

    name: str
    module: str
    call: str
    limit: float


PARTS = (
    Part("roofs", "device", "roofs", 60),
    Part("model", "device", "make_model", 90),
    Part("equality", "equality", "equality", 90),
    Part("paths", "paths", "paths", 90),
    Part("replay", "replay", "replay", 60),
    Part("engine, CUDA graphs", "engine", "graphs", 90),
    Part("learner, bfloat16", "learner", "learner_bfloat16", 90),
    Part("publication", "weights", "publication", 90),
    Part("load", "weights", "load", 90),
    Part("cycle", "cycle", "cycle", 90),
    Part("plain loop, bfloat16", "learner", "plain_bfloat16", 60),
    Part("learner, any order of sums", "learner", "learner_any_order", 60),
    Part("scores", "scores", "scores", 45),
    Part("learner, sdpa", "learner", "learner_sdpa", 60),
    Part("engine, eager", "engine", "eager", 60),
    Part("engine, generate", "engine", "generate", 90),
    Part("learner, one rank of FSDP2", "learner", "learner_one_rank", 60),
    Part("learner, kept gathered", "learner", "learner_kept_gathered", 60),
    Part("draws", "engine", "draws", 45),
    Part("refreshes", "engine", "refreshes", 100),
    Part("learner, offloaded moments", "learner", "learner_offloaded", 60),
    Part("learner, checkpointing", "learner", "learner_checkpointing", 60),
    Part("attention", "attention", "attention", 60),
    Part("learner, float32", "learner", "learner_float32", 90),
    Part("plain loop, float32", "learner", "plain_float32", 60),
    Part("vLLM, our draws", "vllm_parts", "laminar_draws", 150),
    Part("vLLM, its sampler", "vllm_parts", "vllm_sampler", 120),
    Part("vLLM, FP8", "vllm_parts", "fp8", 150),
    Part("vLLM, sleep", "vllm_parts", "sleep", 120),
)
"""In order of importance: what does not fit into the time is left out."""
SEVERAL = (
    PARTS[1],
    Part("ranks beside one", "several", "equal_ranks", 150),
    Part("learner, bfloat16", "learner", "learner_bfloat16", 90),
    Part("learner, all GPUs", "several", "learner_ranks", 120),
)
"""The parts of a check of several GPUs."""


@dataclass(slots=True)
class Outcome:
    """The figures of a part, or why there are none."""

    figures: list[Figure] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """The outcome for the JSON file."""
        return {
            "seconds": round(self.seconds, 1),
            "error": self.error,
            "figures": [each.as_json() for each in self.figures],
        }


class Runner:
    """Runs each part in a process of its own, forked from this one, which has imported everything.

    Where a GPU refuses forked processes they are started anew.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._start = multiprocessing.get_context("fork")

    def describe(self, limit: float) -> dict[str, Any]:
        """What `machine.describe` finds. Raises RuntimeError with the reason if that fails."""
        result, _ = self._in_process("describe", {"device": self._device}, None, limit)
        if isinstance(result, str) and self._device != "cpu":
            self._start = multiprocessing.get_context("spawn")
            result, _ = self._in_process("describe", {"device": self._device}, None, limit)
        if isinstance(result, str):
            raise RuntimeError(result)
        return dict(result)

    @property
    def start_method(self) -> str:
        """How processes are started: "fork" or "spawn"."""
        return self._start.get_start_method()

    def run(self, part: Part, settings: Settings, model: Path, limit: float) -> Outcome:
        """Run `part` in a process that is killed after `limit` seconds."""
        result, seconds = self._in_process(part.name, asdict(settings), model, limit)
        if isinstance(result, str):
            return Outcome(error=result, seconds=seconds)
        return Outcome([figure_of(entry) for entry in result["figures"]], seconds=seconds)

    def _in_process(self, name: str, given: dict[str, Any], model: Path | None, limit: float) -> tuple[Any, float]:
        """The result of a process, or the reason why there is none; and the seconds it took."""
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "result.json"
            process = self._start.Process(target=_child, args=(name, given, model, out))
            process.start()
            process.join(max(1.0, limit))
            seconds = time.perf_counter() - began
            if process.exitcode is None:
                process.kill()
                process.join()
                return f"stopped after {limit:.0f} s", seconds
            if not out.exists():
                return f"its process ended with exit code {process.exitcode}", seconds
            result = json.loads(out.read_text("utf-8"))
            return result.get("error") or result, seconds


def import_parts() -> None:
    """Import the modules of all parts, so that forked processes have them."""
    for part in (*PARTS, *SEVERAL):
        importlib.import_module(f"benchmarks.gpu.{part.module}")


def measure(name: str, given: dict[str, Any], model: Path | None) -> dict[str, Any]:
    """Measure part `name` in this process."""
    if name == "describe":
        from benchmarks.gpu.machine import describe

        return describe(given["device"])
    assert model is not None
    part = next(part for part in (*PARTS, *SEVERAL) if part.name == name)
    settings = Settings(**{**given, "shape": Shape(**given["shape"])})
    call = getattr(importlib.import_module(f"benchmarks.gpu.{part.module}"), part.call)
    return {"figures": [figure.as_json() for figure in call(settings, model)]}


def write_result(name: str, given: dict[str, Any], model: Path | None, out: Path) -> None:
    """Measure part `name` and write its result, or its error, as JSON to `out`."""
    try:
        result = measure(name, given, model)
    except Exception as error:  # noqa: BLE001 - whatever fails is this part's result
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"[:500]}
    out.write_text(json.dumps(result), "utf-8")


def _child(name: str, given: dict[str, Any], model: Path | None, out: Path) -> None:
    os.dup2(2, 1)  # standard output has the table alone
    write_result(name, given, model, out)
