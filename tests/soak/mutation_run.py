"""Mutation test of the trainer's arithmetic: each mutant must fail a test, or be explained in `survivors.json`.

    make soak                                         (as a part of it)
    python tests/soak/mutation_run.py --only losses passes

Survivors, and mutants whose code cannot be swapped, are tested again in a new interpreter, which imports the mutant.
Tests are collected once, in a copy of the repository; each mutant is tested in a fork of that process, by the tests
that run its line, cheapest first. Tests that start processes read the mutant from the copy, and run last. Results are
saved to `results.json` in the folder as they come; run again, it continues with the missing mutants. A mutant is
identified by the text of its module, so mutants of a changed module are tested again. After a change of tests delete
`coverage.json` and test the survivors `--again`. Exit code 1 if a survivor is not explained.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY), str(Path(__file__).parent)]

from forked_tests import Cover, ForkedTests  # noqa: E402
from mutants import PLANTED, Mutant, mutants, planted  # noqa: E402
from swapped_code import swap_code  # noqa: E402

from infra.files import write_atomically  # noqa: E402

MODULES = (
    *("losses", "passes", "advantages", "algorithms", "learner", "metrics", "trained_model", "optimizer", "packing"),
    *("policy", "critic", "global_batch_metadata", "batch", "packed_attention", "lora", "ranks", "device_sharing"),
    *("mismatch", "presets", "context_parallel", "published_weights"),
)
"""Modules of operators/trainer that compute weights and metrics. Other modules are tested by kills."""
TESTS = (
    *("losses", "advantages", "algorithms", "losses_against_verl", "optimizer", "trainer_packing", "training_batch"),
    *("update_against_oracle", "learner", "temperature", "lora", "bfloat16", "model_families", "trainer_checkpoint"),
    *("mismatch", "nonfinite_gradients", "presets", "context_parallel", "published_names", "learner_contract", "ranks"),
)
SURVIVORS = Path(__file__).with_name("survivors.json")
IMPORTED_BEFORE = "ignore::pytest.PytestAssertRewriteWarning"
"""Pytest warns of plugins imported before its start."""
STARTS_PROCESSES_S = 0.5
"""A test whose processes use more CPU seconds than this may run any line in them."""
Results = dict[str, dict[str, str]]


def main(arguments: list[str]) -> int:
    """Test the mutants that have no result yet and print the survivors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "build" / "soak" / "mutations")
    parser.add_argument("--only", nargs="*", default=MODULES, choices=MODULES)
    parser.add_argument("--tests", nargs="*", default=TESTS, choices=TESTS, help="for a first pass: fewer tests")
    parser.add_argument("--again", action="store_true", help="test survivors again")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds per mutant, after which it has failed")
    options = parser.parse_args(arguments)
    folder = options.folder.absolute()
    tree = folder / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("schemas", "infra", "operators", "pipelines", "tests"):
        shutil.copytree(REPOSITORY / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", tree)
    (tree / "docs").mkdir()
    shutil.copy(REPOSITORY / "docs" / "training.md", tree / "docs")  # test_presets compares it
    modules = [f"operators/trainer/{name}.py" for name in MODULES]
    files = [f"tests/operators/trainer/test_{name}.py" for name in options.tests]
    for path in [*modules, *files]:
        if not (tree / path).exists():
            parser.error(f"{path} does not exist: a module or test was renamed")
    os.chdir(tree)
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    sys.dont_write_bytecode = True
    for name in [name for name in sys.modules if name.split(".")[0] in {"operators", "schemas", "infra", "pipelines"}]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(path for path in sys.path if path != str(REPOSITORY))]
    tests = ForkedTests(functools.partial(try_mutants, tree, options))
    settings = ["-s", "-m", "not soak", "-p", "no:cacheprovider", f"--basetemp={folder / 'tmp'}", "-W", IMPORTED_BEFORE]
    pytest.main([*settings, *files], plugins=[tests])
    return tests.code


def try_mutants(tree: Path, options: argparse.Namespace, tests: ForkedTests) -> int:
    """Test every mutant without a result in forks of this process; 1 if a survivor is not explained."""
    trainer, file = tree / "operators" / "trainer", tree.parent / "results.json"
    covers = measure(tests, trainer, tree.parent / "coverage.json", options.timeout)
    if covers is None:
        return 1
    results: Results = json.loads(file.read_text()) if file.exists() else {}
    found: Results = {}
    for module in options.only:
        path = trainer / f"{module}.py"
        source = path.read_text()
        loaded = importlib.import_module(f"operators.trainer.{module}")
        known = (planted(source, *rest) for name, *rest in PLANTED if name == module)
        wanted = different(source, [*known, *mutants(source)])
        keys = [hashlib.sha256(mutant.source.encode()).hexdigest()[:16] for mutant in wanted]
        print(f"{module}: {sum(key in results for key in keys)} of {len(keys)} mutants have results", flush=True)
        for key, mutant in zip(keys, wanted, strict=True):
            if key not in results or (options.again and results[key]["failed"] == "-"):
                began = time.monotonic()
                chosen = candidates(mutant, module, covers)
                cpu_s = 60 + 10 * sum(covers[name].own_s for name in chosen)
                path.write_text(mutant.source)
                failed = tests.first_failure(
                    chosen, functools.partial(swap_code, loaded, mutant.source), cpu_s, options.timeout
                )
                if failed == "-" or failed.startswith("import: "):
                    failed = fresh_failure(module, chosen, options.timeout)
                path.write_text(source)
                shutil.rmtree(tree.parent / "tmp", ignore_errors=True)
                (tree.parent / "tmp").mkdir()
                results[key] = {"module": module, "mutant": mutant.what, "failed": failed}
                write_atomically(file, json.dumps(results, indent=1))
                outcome = "SURVIVES" if failed == "-" else failed.rpartition("/")[2]
                print(f"{module}: {mutant.what}: {outcome} ({time.monotonic() - began:.0f} s)", flush=True)
            found[key] = results[key]
    return report(found)


def different(source: str, found: Sequence[Mutant]) -> list[Mutant]:
    """Those of `found` whose compiled code is neither that of `source` nor that of an earlier one."""
    compiled = {compile(ast.unparse(ast.parse(source)), "", "exec")}
    kept = []
    for mutant in found:
        code = compile(ast.unparse(ast.parse(mutant.source)), "", "exec")
        if code not in compiled:
            compiled.add(code)
            kept.append(mutant)
    return kept


def fresh_failure(module: str, names: Sequence[str], wall_s: float) -> str:
    """What fails in a new interpreter, which imports the mutant: swapped code can be inert, or not swappable."""
    imported = subprocess.run([sys.executable, "-c", f"import operators.trainer.{module}"], capture_output=True)
    if imported.returncode:
        return f"import: {imported.stderr.decode(errors='replace').strip().splitlines()[-1:]}"[:200]
    if not names:
        return "-"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", "-m", "not soak", *names]
    try:
        tested = subprocess.run(command, capture_output=True, text=True, timeout=wall_s)
    except subprocess.TimeoutExpired:
        return "timed out in a new interpreter"
    if tested.returncode == 0:
        return "-"
    if tested.returncode < 0:
        return f"the test process ended by signal {-tested.returncode}"
    failed = [line for line in tested.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if not failed:
        raise RuntimeError(f"pytest ended with {tested.returncode}, no verdict on the mutant: {tested.stdout[-1000:]}")
    return failed[0].partition(" ")[2].partition(" - ")[0]


def measure(tests: ForkedTests, trainer: Path, file: Path, wall_s: float) -> dict[str, Cover] | None:
    """The cover of every test, from `file` as far as it has them of these sources; None if a test fails as it is."""
    sources = hashlib.sha256(b"".join((trainer / f"{name}.py").read_bytes() for name in MODULES)).hexdigest()
    saved = json.loads(file.read_text()) if file.exists() else {}
    found = saved["tests"] if saved.get("sources") == sources else {}
    covers = {name: Cover(**each) for name, each in found.items()}
    for name in tests.names:
        if name not in covers:
            if (cover := tests.cover(name, trainer, wall_s)) is None:
                print(f"{name} fails without a mutant")
                return None
            covers[name] = cover
            tested = {done: asdict(each) for done, each in covers.items()}
            write_atomically(file, json.dumps({"sources": sources, "tests": tested}))
    return {name: covers[name] for name in tests.names}


def candidates(mutant: Mutant, module: str, covers: dict[str, Cover]) -> list[str]:
    """The tests that may run the mutant, cheapest first; those that start processes last."""
    first, last = mutant.lines
    chosen = []
    for name, cover in covers.items():
        lines = cover.lines.get(module, [])
        runs = any(first <= line <= last for line in lines) if mutant.function else bool(lines)
        if runs or cover.children_s > STARTS_PROCESSES_S:
            chosen.append((cover.children_s > STARTS_PROCESSES_S, cover.own_s + cover.children_s, name))
    return [name for *_, name in sorted(chosen)]


def report(found: Results) -> int:
    """Print the score and the unexplained survivors; return 1 if there are any."""
    alive = [each for each in found.values() if each["failed"] == "-"]
    known = json.loads(SURVIVORS.read_text())
    unexplained = [each for each in alive if explanation(each, known) is None]
    print(f"{len(found)} mutants: {len(found) - len(alive)} fail a test, {len(alive) - len(unexplained)} are explained")
    for each in unexplained:
        print(f"survives: {each['module']}: {each['mutant']}")
    return int(bool(unexplained))


def explanation(survivor: dict[str, str], known: Sequence[dict[str, str]]) -> str | None:
    """The reason of the first of `known` with the module and the exact text of `survivor`; None without a match."""
    for each in known:
        if each["module"] == survivor["module"] and each["mutant"] == survivor["mutant"]:
            return each["why"]
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
