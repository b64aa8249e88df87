"""Faults in the trainer's arithmetic, one at a time: each must fail a test, or be explained in `survivors.json`.

    make soak                                         (as a part of it)
    python tests/soak/mutation_run.py --only losses passes

Each mutant is tested in a copy of the repository by a process forked from one that has imported torch. Results go to
`results.json` in the folder as they come; started again, the run goes on with the mutants that are missing. A mutant is
known by the text of its module, so those of a changed module are tested again; after a change of tests remove the file.
Exit code 1 if a survivor is not explained.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY), str(Path(__file__).parent)]

from mutants import mutants  # noqa: E402

from infra.files import write_atomically  # noqa: E402

MODULES = (
    *("losses", "passes", "advantages", "algorithms", "learner", "metrics", "trained_model", "optimizer", "packing"),
    *("policy", "critic", "global_batch_metadata", "batch", "packed_attention", "lora", "ranks", "device_sharing"),
)
"""Of operators/trainer: what decides weights and metrics. Reading, publishing and checkpoints have tests by kills."""
TESTS = (
    *("losses", "advantages", "algorithms", "losses_against_verl", "optimizer", "trainer_packing", "training_batch"),
    *("update_against_oracle", "learner", "temperature", "lora", "bfloat16", "model_families", "trainer_checkpoint"),
    *("ranks",),
)
"""Quickest first: a run ends with the first that fails."""
SURVIVORS = Path(__file__).with_name("survivors.json")
IMPORTED_BEFORE = "ignore::pytest.PytestAssertRewriteWarning"
"""Pytest warns of plugins that were imported before it started, here with torch and transformers."""
MAX_ANSWER = 4096
IMPORTED = ("torch", "transformers", "numpy", "pyarrow", "safetensors.torch", "pydantic", "peft")


class Killer:
    """A pytest plugin: the first test that fails."""

    def __init__(self) -> None:
        self.name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.name:
            self.name = f"import of {report.nodeid}"


def main(arguments: list[str]) -> int:
    """Test the mutants that have no result yet and print the survivors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "build" / "soak" / "mutations")
    parser.add_argument("--only", nargs="*", default=MODULES, choices=MODULES)
    parser.add_argument("--most", type=int, default=10**9, help="mutants to test in this run")
    parser.add_argument(
        "--timeout", type=float, default=1500.0, help="seconds of one mutant; beyond it counts as failed"
    )
    asked = parser.parse_args(arguments)
    tree, file = asked.folder / "tree", asked.folder / "results.json"
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("schemas", "infra", "operators", "pipelines", "tests"):
        shutil.copytree(REPOSITORY / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", tree)
    results: dict[str, dict[str, str]] = json.loads(file.read_text()) if file.exists() else {}
    for path in [f"operators/trainer/{name}.py" for name in MODULES] + [
        f"tests/operators/trainer/test_{name}.py" for name in TESTS
    ]:
        if not (tree / path).exists():
            parser.error(f"there is no {path}: a module or test was renamed")
    for name in IMPORTED:
        importlib.import_module(name)
    if not results and (why := run_tests(tree, asked.timeout)) != "-":
        print(f"the tests fail without a mutant: {why}")
        return 1
    left = asked.most
    for module in asked.only:
        path = tree / "operators" / "trainer" / f"{module}.py"
        source = path.read_text()
        for mutant in mutants(source):
            key = hashlib.sha256(mutant.source.encode()).hexdigest()[:16]
            if key not in results and left > 0:
                left -= 1
                path.write_text(mutant.source)
                began = time.monotonic()
                killer = run_tests(tree, asked.timeout)
                results[key] = {"module": module, "mutant": mutant.what, "failed": killer}
                write_atomically(file, json.dumps(results, indent=1).encode())
                outcome = "SURVIVES" if killer == "-" else killer
                print(f"{module}: {mutant.what}: {outcome} ({time.monotonic() - began:.0f} s)", flush=True)
        path.write_text(source)
    return report(asked.only, results)


def run_tests(tree: Path, timeout_s: float) -> str:
    """The first test that fails in `tree`, "-" if none does."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(told)
        try:
            os.setsid()
            answer = _tests_in(tree)
        except BaseException:  # noqa: BLE001  (reported by the parent; this process ends here)
            answer = f"the test process failed: {traceback.format_exc()}"
        os.write(tell, answer.encode()[-MAX_ANSWER:])
        os._exit(0)
    os.close(tell)
    deadline = time.monotonic() + timeout_s
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(told)
            return f"not done after {timeout_s:.0f} s"
        time.sleep(0.05)
    with os.fdopen(told) as answer:
        return answer.read() or "the test process died"


def _tests_in(tree: Path) -> str:
    """What `run_tests` says, of this process; "-" if all pass."""
    silent = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(silent, descriptor)
    os.chdir(tree)
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    sys.dont_write_bytecode = True
    for name in [name for name in sys.modules if name.split(".")[0] in {"operators", "schemas", "infra", "pipelines"}]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(path for path in sys.path if path != str(REPOSITORY))]
    killer = Killer()
    files = [f"tests/operators/trainer/test_{name}.py" for name in TESTS]
    options = ["-x", "-q", "-m", "not soak", "-p", "no:cacheprovider", "-W", IMPORTED_BEFORE]
    code = pytest.main([*options, *files], plugins=[killer])
    return killer.name or ("-" if code == 0 else f"pytest exit code {int(code)}")


def report(modules: tuple[str, ...], results: dict[str, dict[str, str]]) -> int:
    """Print the score and what survives; 1 if that is not all explained."""
    found = [each for each in results.values() if each["module"] in modules]
    alive = [each for each in found if each["failed"] == "-"]
    known = json.loads(SURVIVORS.read_text())
    strange = [each for each in alive if explanation(each, known) is None]
    print(f"{len(found)} mutants: {len(found) - len(alive)} fail a test, {len(alive) - len(strange)} are explained")
    for each in strange:
        print(f"survives: {each['module']}: {each['mutant']}")
    return int(bool(strange))


def explanation(survivor: dict[str, str], known: list[dict[str, str]]) -> str | None:
    """Why `survivor` may survive: the first of `known` whose module and pattern it matches."""
    for each in known:
        if each["module"] == survivor["module"] and fnmatch.fnmatchcase(survivor["mutant"], each["mutant"]):
            return each["why"]
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
