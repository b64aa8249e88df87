"""Mutation test of the trainer's arithmetic: each mutant must fail a test, or be explained in `survivors.json`.

    make soak                                         (as a part of it)
    python tests/soak/mutation_run.py --only losses passes

Each mutant is tested in a copy of the repository by a process forked from one that has imported torch. Results are
saved to `results.json` in the folder as they come; run again, it continues with the missing mutants. A mutant is
identified by the text of its module, so mutants of a changed module are tested again; after a change of tests delete
the file. Exit code 1 if a survivor is not explained.
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
"""Modules of operators/trainer that compute weights and metrics. Other modules are tested by kills."""
TESTS = (
    *("losses", "advantages", "algorithms", "losses_against_verl", "optimizer", "trainer_packing", "training_batch"),
    *("update_against_oracle", "learner", "temperature", "lora", "bfloat16", "model_families", "trainer_checkpoint"),
    *("ranks",),
)
"""Fastest first: a run stops at the first failure."""
SURVIVORS = Path(__file__).with_name("survivors.json")
IMPORTED_BEFORE = "ignore::pytest.PytestAssertRewriteWarning"
"""Pytest warns of plugins imported before its start, here with torch and transformers."""
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
    parser.add_argument("--most", type=int, default=10**9, help="maximum number of mutants to test in this run")
    parser.add_argument(
        "--timeout", type=float, default=1500.0, help="seconds per mutant; a mutant that takes longer counts as failed"
    )
    options = parser.parse_args(arguments)
    tree, file = options.folder / "tree", options.folder / "results.json"
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("schemas", "infra", "operators", "pipelines", "tests"):
        shutil.copytree(REPOSITORY / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", tree)
    results: dict[str, dict[str, str]] = json.loads(file.read_text()) if file.exists() else {}
    for path in [f"operators/trainer/{name}.py" for name in MODULES] + [
        f"tests/operators/trainer/test_{name}.py" for name in TESTS
    ]:
        if not (tree / path).exists():
            parser.error(f"{path} does not exist: a module or test was renamed")
    for name in IMPORTED:
        importlib.import_module(name)
    if not results and (why := run_tests(tree, options.timeout)) != "-":
        print(f"the tests fail without a mutant: {why}")
        return 1
    left = options.most
    for module in options.only:
        path = tree / "operators" / "trainer" / f"{module}.py"
        source = path.read_text()
        for mutant in mutants(source):
            key = hashlib.sha256(mutant.source.encode()).hexdigest()[:16]
            if key not in results and left > 0:
                left -= 1
                path.write_text(mutant.source)
                began = time.monotonic()
                killer = run_tests(tree, options.timeout)
                results[key] = {"module": module, "mutant": mutant.what, "failed": killer}
                write_atomically(file, json.dumps(results, indent=1).encode())
                outcome = "SURVIVES" if killer == "-" else killer
                print(f"{module}: {mutant.what}: {outcome} ({time.monotonic() - began:.0f} s)", flush=True)
        path.write_text(source)
    return report(options.only, results)


def run_tests(tree: Path, timeout_s: float) -> str:
    """The first test that fails in `tree`, "-" if none does."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        try:
            os.setsid()
            outcome = _run_tests_here(tree)
        except BaseException:  # noqa: BLE001  (reported by the parent; this process ends here)
            outcome = f"the test process failed: {traceback.format_exc()}"
        os.write(write_end, outcome.encode()[-MAX_ANSWER:])
        os._exit(0)
    os.close(write_end)
    deadline = time.monotonic() + timeout_s
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(read_end)
            return f"not done after {timeout_s:.0f} s"
        time.sleep(0.05)
    with os.fdopen(read_end) as outcome:
        return outcome.read() or "the test process died"


def _run_tests_here(tree: Path) -> str:
    """The result of `run_tests`, computed in this process; "-" if all tests pass."""
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
    """Print the score and the unexplained survivors; return 1 if there are any."""
    found = [each for each in results.values() if each["module"] in modules]
    alive = [each for each in found if each["failed"] == "-"]
    known = json.loads(SURVIVORS.read_text())
    unexplained = [each for each in alive if explanation(each, known) is None]
    print(f"{len(found)} mutants: {len(found) - len(alive)} fail a test, {len(alive) - len(unexplained)} are explained")
    for each in unexplained:
        print(f"survives: {each['module']}: {each['mutant']}")
    return int(bool(unexplained))


def explanation(survivor: dict[str, str], known: list[dict[str, str]]) -> str | None:
    """The reason of the first of `known` whose module and pattern match `survivor`; None without a match."""
    for each in known:
        if each["module"] == survivor["module"] and fnmatch.fnmatchcase(survivor["mutant"], each["mutant"]):
            return each["why"]
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
