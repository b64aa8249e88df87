"""Mutation test of the trainer's arithmetic: each mutant must fail a test, or be explained in `survivors.json`.

    make soak                                         (as a part of it)
    python tests/soak/mutation_run.py --only losses passes

Tests are collected once, in a copy of the repository; each mutant is tested in a fork of that process, by the tests
that run its line: first those with the most kills per CPU second in the same module, kills of near lines above all,
then the cheapest. It survives if none fails within about `--budget` CPU seconds; a larger budget tests it again,
unless it is explained. Survivors whose line runs at the module's import, and mutants whose code cannot be swapped, are
tested again in a new interpreter, which imports the mutant. Processes that tests start read the mutant from the copy.
A test that takes longer than max(60 s, 8 x its time without a mutant) has failed: `time-out: TEST`. Results are kept in
`mutation_results.json`, one line a mutant; run again, it continues with the missing mutants. A mutant is identified by
the functions that it changes, before and after, so mutants of a changed function are tested again. After other changes,
`--confirm` tests results of other tests and sources again: a killed mutant first by the test that failed.
`--jobs 2` divides the mutants among two processes. Exit code 1 if a survivor is not explained.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import functools
import hashlib
import importlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY), str(Path(__file__).parent)]

from forked_tests import Cover, ForkedTests, kill_session, read_watched  # noqa: E402
from line_tracer import AFTER  # noqa: E402
from mutants import PLANTED, Mutant, definitions, mutants, planted  # noqa: E402
from planted_faults import IMPORTED_BEFORE  # noqa: E402
from swapped_code import swap_code  # noqa: E402

from infra.files import write_atomically  # noqa: E402

MODULES = (
    *("losses", "passes", "advantages", "algorithms", "learner", "metrics", "trained_model", "packing"),
    *("policy", "critic", "global_batch_metadata", "batch", "packed_attention", "lora", "ranks", "device_sharing"),
    *("mismatch", "presets", "context_parallel", "published_weights", "token_scores"),
)
"""Modules of operators/trainer that compute weights and metrics."""
LEFT_OUT = {
    "interfaces and configurations, without arithmetic": (
        *("config", "training_config", "warm_start_config", "warm_start_record", "learner_contract", "learner_state"),
        *("emulation", "determinism", "learners"),
    ),
    "files, records and versions: kills (`campaign.py`) and faults (`fault_campaign.py`) test them": (
        *("adapter_folder", "assembly", "checkpoint", "checkpoint_files", "checkpoint_model", "checkpoint_writer"),
        *("clean_stop", "persist", "manifest_history", "publishing", "version_file", "version_publisher"),
        *("background_writer", "weight_parts", "train_batches", "missing_batch"),
    ),
    "what ranks and roles do together: kills test them": (
        *("joint_actions", "rank_addresses", "rank_checks", "rank_layouts", "rank_lost", "rank_services"),
        *("rank_training", "rendezvous"),
        *("replay", "train_follower"),
    ),
    "kernels of a GPU: compared with torch at their first use": (
        *("score_kernels", "layer_kernels", "checked_kernels", "fused_layers"),
    ),
    "not a part of a run's training": ("emulate_training", "imitation", "memory_plan", "warm_start"),
}
"""The other modules, by the reason for which they have no mutants."""
TESTS_FOLDER = "tests/operators/trainer"
TESTS = (
    *("losses", "advantages", "algorithms", "losses_against_verl", "optimizer", "trainer_packing", "training_batch"),
    *("update_against_oracle", "learner", "temperature", "lora", "bfloat16", "model_families", "trainer_checkpoint"),
    *("mismatch", "nonfinite_gradients", "presets", "context_parallel", "published_names", "learner_contract", "ranks"),
    *("token_scores", "learner_state", "update_metrics", "loaded_policy", "device_turns", "fused_layers"),
    "global_batch_metadata",
)
TOGETHER = {
    "test_update_against_oracle.py": "of_two_ranks",
    "test_ranks.py": "folder",
    "test_nonfinite_gradients.py": "ranks",
}
"""Fixtures that start ranks once for many tests of a file."""
PLANTED_FOR = {what: test for _, what, _, test in PLANTED}
RESULTS = Path(__file__).with_name("mutation_results.json")
SURVIVORS = Path(__file__).with_name("survivors.json")
NEAR_LINES, NEAR_KILLS = 12, 20
"""Kills of mutants at most so many lines away count as so many."""
SWAPPED_S = 5.0
"""CPU seconds of the tests of a mutant of an import, before they run in an interpreter that imports it."""
START_S = 120.0
"""Seconds within which an interpreter has imported everything."""
RESULT = "RESULT "
"""What a worker's lines of results begin with."""
TIME_OUT = "time-out: "
Results = dict[str, dict[str, str]]


def main(arguments: list[str]) -> int:
    """Test the mutants that have no result yet, in workers, and print the survivors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "build" / "soak" / "mutations")
    parser.add_argument("--only", nargs="*", default=MODULES, choices=MODULES)
    parser.add_argument("--confirm", action="store_true", help="test results of other tests and sources again")
    parser.add_argument("--jobs", type=int, default=1, help="processes among which the mutants are divided")
    parser.add_argument("--budget", type=float, default=60.0, metavar="S", help="CPU seconds of the tests of a mutant")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker is None:
        return direct(options, arguments)
    folder = options.folder.absolute() / str(options.worker)
    tree = folder / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("schemas", "infra", "operators", "pipelines", "tests"):
        shutil.copytree(REPOSITORY / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", tree)
    shutil.copy(REPOSITORY / "tests" / "soak" / "line_tracer.py", tree / "sitecustomize.py")
    (tree / "docs").mkdir()
    shutil.copy(REPOSITORY / "docs" / "training.md", tree / "docs")  # test_presets compares it
    modules = [f"operators/trainer/{name}.py" for name in MODULES]
    files = [f"{TESTS_FOLDER}/test_{name}.py" for name in TESTS]
    for path in [*modules, *files]:
        if not (tree / path).exists():
            parser.error(f"{path} does not exist: a module or test was renamed")
    os.chdir(tree)
    os.environ |= {
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(tree),
        AFTER: "transformers.modeling_utils",
    }
    sys.dont_write_bytecode = True
    for name in [name for name in sys.modules if name.split(".")[0] in {"operators", "schemas", "infra", "pipelines"}]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(path for path in sys.path if path != str(REPOSITORY))]
    tests = ForkedTests(functools.partial(try_mutants, tree, options), TOGETHER)
    settings = ["-s", "-m", "not soak", "-p", "no:cacheprovider", f"--basetemp={folder / 'tmp'}", "-W", IMPORTED_BEFORE]
    pytest.main([*settings, *files], plugins=[tests])
    return tests.code


def try_mutants(tree: Path, options: argparse.Namespace, tests: ForkedTests) -> int:
    """Print the results of this worker's mutants without one, tested in forks of this process; 1 without covers."""
    trainer = tree / "operators" / "trainer"
    helpers = [file for file in (tree / TESTS_FOLDER).rglob("*.py") if not file.name.startswith("test_")]
    sources = [*trainer.rglob("*.py"), *(tree / "tests").glob("*.py"), *helpers]
    tested = digest([*sources, *(tree / TESTS_FOLDER).rglob("test_*.py")])
    with open(tree.parents[1] / "coverage.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first worker measures, the others then read its file
        covers = measure(tests, trainer, tree.parents[1] / "coverage.json", digest(sources))
    if covers is None:
        return 1
    results, known_survivors = read_results(RESULTS), json.loads(SURVIVORS.read_text())
    names = {member: name for name, members in tests.members.items() for member in members}
    for module in options.only:
        all_mutants = mutants_of(module, (trainer / f"{module}.py").read_text())
        # The same mutant of an earlier source of the module is likely to fail the same test.
        before_change = {each["mutant"]: killer_of(each) for each in results.values() if each["module"] == module}
        for key, mutant in all_mutants.items():
            if int(key, 16) % options.jobs != options.worker:
                continue
            before = results.get(key)
            if is_due(before, tested, options, known_survivors):
                began = time.monotonic()
                killers = {each: killer_of(results[each]) for each in all_mutants.keys() & results.keys()}
                kills = kills_near(mutant, {all_mutants[each]: names.get(at, at) for each, at in killers.items()})
                known = (PLANTED_FOR.get(mutant.what), killers.get(key), before_change.get(mutant.what))
                first = [names.get(name, name) for name in known if name]
                chosen = within(options.budget, candidates(mutant, module, covers, kills), covers)
                tried = list(dict.fromkeys([*(name for name in first if name in covers), *chosen]))
                failed = first_failure(tests, trainer, module, mutant, tried, covers)
                results[key] = {"module": module, "mutant": mutant.what, "failed": failed, "tested": tested}
                if failed == "-":
                    results[key]["budget"] = f"{options.budget:g}"
                outcome = "SURVIVES" if failed == "-" else failed.rpartition("/")[2]
                print(f"{module}: {mutant.what}: {outcome} ({time.monotonic() - began:.0f} s)")
                print(RESULT + json.dumps({key: results[key]}), flush=True)
    return 0


def direct(options: argparse.Namespace, arguments: list[str]) -> int:
    """Start workers, save the results that they print, and report; 1 if a worker fails or a survivor is unexplained."""
    results, lock = read_results(RESULTS), threading.Lock()
    wanted = {
        key
        for module in options.only
        for key in mutants_of(module, (REPOSITORY / "operators" / "trainer" / f"{module}.py").read_text())
    }
    print(f"{len(wanted & results.keys())} of {len(wanted)} mutants have results", flush=True)

    def follow(number: int) -> int:
        command = [sys.executable, __file__, *arguments, "--worker", str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                with lock:
                    if line.startswith(RESULT):
                        results.update(json.loads(line.removeprefix(RESULT)))
                        write_results(RESULTS, results)
                    else:
                        print(line, end="", flush=True)
        if worker.returncode:
            print(f"worker {number} ended with {worker.returncode}; mutants without a result remain", flush=True)
        return worker.returncode

    with ThreadPoolExecutor(options.jobs) as pool:
        codes = list(pool.map(follow, range(options.jobs)))
    return report({key: results[key] for key in wanted & results.keys()}) or int(any(codes))


def is_due(
    before: dict[str, str] | None, tested: str, options: argparse.Namespace, known: Sequence[dict[str, str]]
) -> bool:
    """Whether a mutant that had the result `before` is tested: it had none, or `--confirm` asks, or a larger budget,
    unless `known` explains it."""
    if before is None or (options.confirm and before["tested"] != tested):
        return True
    return before["failed"] == "-" and float(before["budget"]) < options.budget and not explanation(before, known)


def kills_near(mutant: Mutant, killers: Mapping[Mutant, str]) -> Counter[str]:
    """How many of the mutants in `killers` each test has killed; one in the lines around `mutant` counts as many."""
    kills: Counter[str] = Counter()
    for other, killer in killers.items():
        kills[killer] += NEAR_KILLS if abs(other.lines[0] - mutant.lines[0]) <= NEAR_LINES else 1
    return kills


def mutants_of(module: str, source: str) -> dict[str, Mutant]:
    """The mutants of `source` by their key in the results, planted ones first."""
    known = (planted(source, what, changes) for name, what, changes, _ in PLANTED if name == module)
    before = definitions(source)
    found = {}
    for mutant in different(source, [*known, *mutants(source)]):
        changed = sorted(before ^ definitions(mutant.source))
        found[hashlib.sha256("\0".join((module, *changed)).encode()).hexdigest()[:16]] = mutant
    return found


def killer_of(result: dict[str, str]) -> str:
    """The test that failed, by pytest's name; other text without one."""
    return result["failed"].removeprefix(TIME_OUT)


def digest(files: Sequence[Path]) -> str:
    """The hash of the contents of `files`."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()[:12]


def read_results(file: Path) -> Results:
    """The results in `file`, by key; lines may be in any order, as after a merge."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {line["key"]: {name: line[name] for name in line if name != "key"} for line in map(json.loads, lines)}


def write_results(file: Path, results: Results) -> None:
    """Write `results` to `file`, one line a mutant, sorted by key."""
    write_atomically(file, "".join(json.dumps({"key": key, **results[key]}) + "\n" for key in sorted(results)))


def first_failure(
    tests: ForkedTests, trainer: Path, module: str, mutant: Mutant, names: Sequence[str], covers: dict[str, Cover]
) -> str:
    """The first of the tests `names` that fails with `mutant`, "-" if none does."""
    path, loaded = trainer / f"{module}.py", importlib.import_module(f"operators.trainer.{module}")
    source = path.read_text()
    path.write_text(mutant.source)
    limits = {name: covers[name].limit_s for name in names}
    first = names if mutant.function else within(SWAPPED_S, names, covers)
    failed = tests.first_failure(
        {name: limits[name] for name in first}, functools.partial(swap_code, loaded, mutant.source)
    )
    if (failed == "-" and not mutant.function) or failed.startswith("import: "):
        failed = fresh_failure(module, {each: limits[name] for name in names for each in tests.members[name]})
    path.write_text(source)
    temporary = trainer.parents[2] / "tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    return failed


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


def fresh_failure(module: str, limits: dict[str, float]) -> str:
    """What fails in a new interpreter, which imports the mutant: swapped code can be inert, or not swappable."""
    imported, status = watched([sys.executable, "-c", f"import operators.trainer.{module}"], {})
    if status:
        return f"import: {imported.strip().splitlines()[-1:]}"[:200]
    if not limits:
        return "-"
    settings = ["-x", "-v", "-rfE", "-p", "no:cacheprovider", "-m", "not soak"]
    printed, status = watched([sys.executable, "-m", "pytest", *settings, *limits], limits)
    if status is None:
        return TIME_OUT + printed.rpartition("\n")[2].strip()
    if status == 0:
        return "-"
    if status < 0:
        return f"the test process ended by signal {-status}"
    failed = [line for line in printed.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if not failed:
        raise RuntimeError(f"pytest ended with {status}, no verdict on the mutant: {printed[-1000:]}")
    return failed[0].partition(" ")[2].partition(" - ")[0]


def watched(command: Sequence[str], limits: dict[str, float]) -> tuple[str, int | None]:
    """What `command` prints and its status, None if the test of its last line exceeded its limit."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            printed, ended = read_watched(process.stdout.fileno(), limits, START_S)
            return printed, process.wait() if ended else None
        finally:
            kill_session(process.pid)


def measure(tests: ForkedTests, trainer: Path, file: Path, sources: str) -> dict[str, Cover] | None:
    """The cover of every test; None if a test fails as it is.

    Those in `file` are kept, as far as they are of these `sources` and of the test's file as it is.
    """
    saved = json.loads(file.read_text()) if file.exists() else {}
    done: dict[str, dict[str, Any]] = saved["tests"] if saved.get("sources") == sources else {}
    for name in tests.names:
        of = digest([Path(name.partition("::")[0])])
        if name not in done or done[name]["file"] != of:
            if (cover := tests.cover(name, trainer)) is None:
                print(f"{name} fails without a mutant")
                return None
            done[name] = {"file": of, **asdict(cover)}
            write_atomically(file, json.dumps({"sources": sources, "tests": done}))
    return {name: Cover(*(done[name][each.name] for each in fields(Cover))) for name in tests.names}


def candidates(mutant: Mutant, module: str, covers: dict[str, Cover], kills: Counter[str]) -> list[str]:
    """The tests that run the mutant in any process, by kills per CPU second, then cheapest first. Each test counts one
    kill more than it has, so that a cheap one without any comes before an expensive one with many.

    A mutant of an import runs in each that runs a line of the module; those of its own file may only read its values.
    """
    first, last = mutant.lines
    chosen = []
    for name, cover in covers.items():
        lines = cover.lines.get(module, [])
        if mutant.function:
            runs = any(first <= line <= last for line in lines)
        else:
            runs = bool(lines) or f"/test_{module}.py::" in name
        if runs:
            chosen.append((-(kills[name] + 1) / max(cover.cpu_s, 0.01), cover.cpu_s, name))
    return [name for *_, name in sorted(chosen)]


def within(budget_s: float, names: Sequence[str], covers: dict[str, Cover]) -> list[str]:
    """The first of `names` that take `budget_s` CPU seconds together, and the one that exceeds them."""
    before = itertools.accumulate((covers[name].cpu_s for name in names), initial=0.0)
    return [name for name, used in zip(names, before, strict=False) if used < budget_s]


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
