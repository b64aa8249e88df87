"""Mutants change what loaded code does, without a new import; faults of earlier reviews still apply to the sources."""

from __future__ import annotations

import ast
import importlib
import json
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import line_tracer
import pytest
from forked_tests import Cover, in_fork, traced_lines
from log_fixes import Fix
from mutants import PLANTED, Mutant, mutants, planted
from mutation_run import (
    LEFT_OUT,
    MODULES,
    candidates,
    different,
    explanation,
    is_due,
    kills_near,
    mutants_of,
    read_results,
    watched,
    within,
    write_results,
)
from removed_fixes import FIXES
from swapped_code import swap_code

REPOSITORY = Path(__file__).parents[2]
TRAINER = REPOSITORY / "operators" / "trainer"
SOURCE = """
from dataclasses import dataclass; from functools import cached_property
LIMIT = 20.5
CHOICES = {"one": 1}
def limited(value, least=0):
    return max(least, min(value, LIMIT))
@dataclass(frozen=True, slots=True)
class Point:
    x: int = 1
    @property
    def doubled(self):
        return 2 * self.x
    @staticmethod
    def origin():
        return 0
class Line:
    @cached_property
    def length(self):
        return 4
"""
USER = "from mutated_module import CHOICES, LIMIT, Line, Point, limited\n"


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """A module with `SOURCE`, and one that has imported its names."""
    (tmp_path / "mutated_module.py").write_text(SOURCE)
    (tmp_path / "user_module.py").write_text(USER)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("mutated_module", "user_module"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("mutated_module"), importlib.import_module("user_module")


@pytest.mark.parametrize(
    ("before", "after", "value", "expected"),
    [
        ("min(value, LIMIT)", "max(value, LIMIT)", lambda user: user.limited(3), 20.5),
        ("least=0", "least=7", lambda user: user.limited(3), 7),
        ("LIMIT = 20.5", "LIMIT = 2.5", lambda user: user.limited(3), 2.5),
        ("LIMIT = 20.5", "LIMIT = 2.5", lambda user: user.LIMIT, 2.5),
        ('"one": 1', '"one": 2', lambda user: user.CHOICES["one"], 2),
        ("x: int = 1", "x: int = 5", lambda user: user.Point().x, 5),
        ("2 * self.x", "3 * self.x", lambda user: user.Point().doubled, 3),
        ("return 0", "return 1", lambda user: user.Point.origin(), 1),
        ("return 4", "return 5", lambda user: user.Line().length, 5),
    ],
)
def test_swapped_code_runs_in_modules_that_imported_it(
    modules: tuple[ModuleType, ModuleType], before: str, after: str, value: Callable[[Any], float], expected: float
) -> None:
    changed, user = modules
    assert value(user) != expected
    swap_code(changed, SOURCE.replace(before, after))
    assert value(user) == expected


def test_swapped_code_leaves_imported_values(modules: tuple[ModuleType, ModuleType]) -> None:
    changed, user = modules
    swap_code(user, USER)
    assert user.CHOICES == changed.CHOICES == {"one": 1}


def test_mutants_have_the_lines_of_their_statement() -> None:
    found = {mutant.what: (mutant.lines, mutant.function) for mutant in mutants(SOURCE)}
    assert found["20.5 to 41.0: LIMIT = 20.5"] == ((3, 3), False)
    assert found["min to max: return max(least, min(value, LIMIT))"] == ((6, 6), True)
    assert found["0 to 1: def limited(value, least=0):"] == ((6, 6), True)  # read in the body
    assert found["1 to 2: x: int = 1"] == ((9, 9), False)


def test_mutants_of_equal_code_are_tested_once() -> None:
    (limit,) = [mutant for mutant in mutants(SOURCE) if mutant.what.startswith("20.5 to 41.0")]
    same = planted(SOURCE, "comment", [("LIMIT = 20.5", "LIMIT = 20.5  # the same")])
    assert different(SOURCE, [same, limit, limit]) == [limit]


def test_explanations_are_of_the_exact_mutant() -> None:
    known = [{"module": "losses", "mutant": "Add to Sub: *", "why": "any"}]
    assert explanation({"module": "losses", "mutant": "Add to Sub: a + b"}, known) is None
    assert explanation({"module": "losses", "mutant": "Add to Sub: *"}, known) == "any"


def test_results_have_one_line_per_mutant(tmp_path: Path) -> None:
    results = {key: {"module": "losses", "mutant": key, "failed": "-", "tested": "0"} for key in ("b", "a")}
    write_results(tmp_path / "results.json", results)
    assert [line[9] for line in (tmp_path / "results.json").read_text().splitlines()] == ["a", "b"]
    assert read_results(tmp_path / "results.json") == results
    assert read_results(tmp_path / "none.json") == {}


def test_tests_of_a_mutant_take_about_its_budget() -> None:
    covers = {name: Cover(cpu_s, 0.0, {}) for name, cpu_s in {"a": 4.0, "b": 5.0, "c": 6.0, "d": 1.0}.items()}
    assert [within(budget, list("abcd"), covers) for budget in (4.0, 10.0, 99.0)] == [["a"], list("abc"), list("abcd")]


def test_tests_that_killed_near_mutants_come_first() -> None:
    far, near, mutant = (Mutant(what, what, (line, line), True) for what, line in (("a", 1), ("b", 95), ("c", 100)))
    kills = kills_near(mutant, {far: "often", replace(far, what="d"): "often", near: "near"})
    covers = {name: Cover(1.0, 0.0, {"losses": [100]}) for name in ("cheap", "often", "near")}
    assert candidates(mutant, "losses", covers, kills) == ["near", "often", "cheap"]


def test_cheap_test_comes_before_an_expensive_one() -> None:
    mutant = Mutant("a", "a", (1, 1), True)
    covers = {name: Cover(cpu_s, 0.0, {"losses": [1]}) for name, cpu_s in {"ranks": 40.0, "cheap": 0.05}.items()}
    assert candidates(mutant, "losses", covers, Counter({"ranks": 700})) == ["cheap", "ranks"]


@pytest.mark.parametrize(
    ("before", "confirm", "expected"),
    [
        (None, False, True),
        ({"failed": "a test", "tested": "old"}, False, False),
        ({"failed": "a test", "tested": "old"}, True, True),
        ({"failed": "-", "tested": "new", "budget": "60", "module": "losses", "mutant": "other"}, False, True),
        ({"failed": "-", "tested": "new", "budget": "60", "module": "losses", "mutant": "known"}, False, False),
        ({"failed": "-", "tested": "new", "budget": "300"}, True, False),
    ],
)
def test_mutants_are_tested_again(before: dict[str, str] | None, confirm: bool, expected: bool) -> None:
    known = [{"module": "losses", "mutant": "known", "why": "equal results"}]
    assert is_due(before, "new", Namespace(confirm=confirm, budget=300.0), known) is expected


def test_tests_beyond_their_limit_have_failed() -> None:
    def hang(report: Callable[[str], None]) -> str:
        report("test.py::test_first")
        report("test.py::test_second")
        time.sleep(60)
        return "-"

    assert in_fork(hang, {"test.py::test_second": 0.1}) == "time-out: test.py::test_second"
    code = "import time; print('test_second', end='', flush=True); time.sleep(60)"
    assert watched([sys.executable, "-c", code], {"test_second": 0.1}) == ("test_second", None)


def test_lines_of_started_processes_are_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mutated_module.py").write_text(SOURCE)
    shutil.copy(line_tracer.__file__, tmp_path / "sitecustomize.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = "import os; from mutated_module import limited; os.fork() or (limited(1), os._exit(1)); os.wait()"

    def run(report: Callable[[str], None]) -> str:
        return str(traced_lines(tmp_path, lambda: subprocess.run([sys.executable, "-c", code], check=True)))

    assert 6 in ast.literal_eval(in_fork(run, {}))["mutated_module"]


def test_forked_processes_answer() -> None:
    assert in_fork(lambda report: "an answer", {}) == "an answer"


def test_every_trainer_module_has_mutants_or_a_reason() -> None:
    named = [*MODULES, *(name for names in LEFT_OUT.values() for name in names)]
    assert sorted(named) == sorted(file.stem for file in TRAINER.glob("*.py") if file.stem != "__init__")


@pytest.mark.slow
def test_planted_faults_fail_their_test(tmp_path: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "tests" / "soak" / "planted_faults.py"), str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "failed.json").read_text())
    assert found == {"none": "-"} | {what: test for _, what, _, test in PLANTED}


@pytest.mark.parametrize("fix", FIXES, ids=[fix.what.replace(" ", "-") for fix in FIXES])
def test_removed_fixes_apply_and_have_a_test(fix: Fix) -> None:
    source = (REPOSITORY / fix.file).read_text()
    assert planted(source, fix.what, fix.changes).source != source
    file, _, name = fix.test.partition("::")
    assert f"def {name}(" in (REPOSITORY / file).read_text() or not name


def test_mutants_keep_their_results_when_other_functions_change() -> None:
    source = "ONE = 1\nclass A:\n    def f(self, x):\n        return x + 1\n    def g(self, x):\n        return x < 2\n"
    before = {mutant.what: key for key, mutant in mutants_of("metrics", source).items()}
    after = {mutant.what: key for key, mutant in mutants_of("metrics", source.replace("x < 2", "x < 3")).items()}
    same = {what for what in before.keys() & after.keys() if before[what] == after[what]}
    assert same == {"1 to 2: ONE = 1", "Add to Sub: return x + 1", "1 to 2: return x + 1"}
    assert not set(before.values()) & mutants_of("batch", source).keys()
    assert len(before) == len(set(before.values())) == 5
