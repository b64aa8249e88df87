"""The GPU check on a CPU, with a tiny model: every part gives figures, and what fails costs no other part."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

from benchmarks.gpu import parts, paths, stand_ins, table, vllm_parts
from benchmarks.gpu.figures import Figure, figure_of, union
from benchmarks.gpu.parts import PARTS, Outcome, write_result
from benchmarks.gpu.settings import GIB, SHAPES, settings_for

SETTINGS = settings_for("cpu", 0)
INCOMPLETE = ("attention", "paths", "learner, sdpa", "scores")
"""Parts with figures that a CPU, or a machine without some package, does not have."""
STAND_INS = ["annotated_types", "blake3", "crc32c", "psutil"]
_NAME = re.compile(r"[^\w.-]")


HERE = Path(__file__).parent


def run_check(*options: str, results: Path) -> subprocess.CompletedProcess[str]:
    """Run the command on a CPU without packages that torch and transformers do not need."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--results", str(results), *options]
    paths = os.pathsep.join(map(str, (HERE / "torch_alone", HERE.parents[1])))
    environment = os.environ | {"PYTHONPATH": paths, "BLOCKED_PACKAGES": ",".join(other_packages())}
    return subprocess.run(command, env=environment, check=False, capture_output=True, text=True)


def test_gpu_check_is_sent_with_less_than_64_megabytes() -> None:
    """Its code and inputs are the tracked files: a service that lends a GPU may take no more."""
    root = HERE.parents[1]
    with suppress(FileNotFoundError):  # no git
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=False, capture_output=True, text=True)
        if names := listed.stdout.split("\0")[:-1]:
            files = [root / name for name in names if (root / name).is_file()]
            assert 0 < sum(file.stat().st_size for file in files) < 64e6
            return
    pytest.skip("not a git checkout")


@pytest.mark.slow
def test_gpu_check_needs_only_torch_and_transformers(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    done = run_check(results=results)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(results.read_text("utf-8"))
    assert found["device"]["stand-ins"] == STAND_INS
    assert list(found["parts"]) == [part.name for part in PARTS]
    for name, outcome in found["parts"].items():
        figures = [figure_of(entry) for entry in outcome["figures"]]
        assert figures, name
        known = [figure for figure in figures if not math.isnan(figure.value)]
        assert len(known) == len(figures) or name in INCOMPLETE or "vLLM" in name
        assert all(figure.value >= 0 for figure in known)
        if name == "learner, bfloat16":
            assert figures[0].note == "flash_attention; scores by torch"
        if name in ("equality", "paths"):
            assert all(figure.passed is not False for figure in figures), figures


def test_gpu_check_leaves_out_what_its_time_does_not_cover(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    assert run_check("--minutes", "0", results=results).returncode == 1
    outcomes = json.loads(results.read_text("utf-8"))["parts"]
    assert {name: outcome["error"] for name, outcome in outcomes.items()} == {
        part.name: "left out: 0 minutes are over" for part in PARTS
    }


def test_gpu_check_leaves_vllm_out_where_it_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for part in (part for part in PARTS if part.module == "vllm_parts"):
        (figure,) = getattr(vllm_parts, part.call)(SETTINGS, tmp_path)
        assert (math.isnan(figure.value), figure.note) == (True, "vLLM is not installed")


@pytest.mark.slow
def test_gpu_check_compares_ranks_with_one(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    measured = ["ranks beside one", "learner, all GPUs"]
    done = run_check("--gpus", "2", "--only", *measured, results=results)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(results.read_text("utf-8"))["parts"]
    assert list(found) == ["model", *measured]
    equal = [figure_of(entry) for entry in found["ranks beside one"]["figures"]]
    assert len(equal) == 6
    assert all(figure.goal and figure.passed for figure in equal), equal
    (speed,) = (figure_of(entry) for entry in found["learner, all GPUs"]["figures"])
    assert (speed.value > 0, speed.note) == (True, "by 2 ranks")


def test_gpu_check_reports_a_part_that_fails(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    write_result("load", asdict(SETTINGS), tmp_path / "absent", out)
    assert "there is no model folder" in json.loads(out.read_text("utf-8"))["error"]


def test_gpu_check_goes_on_after_a_path_that_fails() -> None:
    (figure,) = paths._attempt("weights, PPO", lambda: {"": (1 / 0, ("<=", 1.0))})
    assert figure.passed is False
    assert figure.note == "ZeroDivisionError: division by zero"


def test_gpu_check_describes_the_device_in_a_process_of_its_own() -> None:
    assert parts.Runner("cpu").describe(limit=120)["name"] == "cpu"


def test_gpu_check_stops_a_part_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "measure", _never_ends)
    assert parts.Runner("cpu").run(PARTS[0], SETTINGS, tmp_path, limit=1).error == "stopped after 1 s"


def test_gpu_check_reports_a_part_whose_process_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "measure", _kills_itself)
    outcome = parts.Runner("cpu").run(PARTS[0], SETTINGS, tmp_path, limit=60)
    assert outcome.error == "its process ended with exit code -9"


def test_stand_ins_replace_only_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stand_ins.install_missing() == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in STAND_INS:
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))
    assert stand_ins.install_missing() == STAND_INS
    import blake3
    import crc32c
    import psutil

    one, other = blake3.blake3(), blake3.blake3(b"ab")
    one.update(b"a")
    one.update(b"b")
    assert one.hexdigest() == other.hexdigest()
    assert crc32c.crc32c(b"a") != crc32c.crc32c(b"b")
    assert psutil.virtual_memory().available > 0
    assert psutil.Process().create_time() > 0


def test_gpu_check_takes_the_largest_model_that_fits() -> None:
    assert settings_for("cuda", 139 * GIB).shape is SHAPES[0]
    assert settings_for("cuda", 31 * GIB).shape is SHAPES[1]
    assert settings_for("cuda", 1 * GIB).shape is SHAPES[-1]


def test_spans_that_overlap_are_covered_once() -> None:
    assert union([]) == 0
    assert union([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5)]) == 5


def test_table_compares_parts_and_names_missed_goals() -> None:
    outcomes = {
        "roofs": Outcome([Figure("matrix product, bfloat16", 700.0, "TFLOP/s")]),
        "model": Outcome([Figure("parameters", 1500.0, "M")]),
        "engine, CUDA graphs": Outcome([Figure("tokens", 900.0, "tokens/s")]),
        "engine, eager": Outcome([Figure("tokens", 1000.0, "tokens/s")]),
        "learner, bfloat16": Outcome([Figure("trained", 35_000.0, "tokens/s")]),
        "load": Outcome(error="out of memory"),
        "attention": Outcome([Figure("float32, flash", math.nan, "ms", note="no kernel")]),
    }
    compared = {figure.name: figure for figure in table.comparisons(outcomes)}
    assert compared["CUDA graphs over eager"].passed is False
    assert compared["MFU, learner, bfloat16"].value == pytest.approx(45.0)
    text = table.render(outcomes | {"comparisons": Outcome(list(compared.values()))})
    assert "goals not reached: comparisons: CUDA graphs over eager" in text
    assert "not measured: out of memory" in text
    written = json.dumps([each.as_json() for outcome in outcomes.values() for each in outcome.figures])
    assert "NaN" not in written


def _never_ends(*_: object) -> None:
    time.sleep(600)


def _kills_itself(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def other_packages() -> list[str]:
    """The installed packages that neither torch nor transformers needs, by the names under which they are imported."""
    needed, todo = {"laminar-rl", "typer"}, ["torch", "transformers"]  # typer is needed by their commands alone
    while todo:
        name = _canonical(todo.pop())
        if name not in needed:
            needed.add(name)
            with suppress(PackageNotFoundError):  # of another platform
                todo += [_NAME.split(each)[0] for each in requires(name) or [] if "extra ==" not in each]
    found = packages_distributions().items()
    return sorted(name for name, sources in found if needed.isdisjoint(map(_canonical, sources)))


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
