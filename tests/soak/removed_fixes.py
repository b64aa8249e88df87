"""Removes each fix of log_fixes.py and role_fixes.py, one at a time, and runs its test, which must fail.

    python tests/soak/removed_fixes.py [--only WORD …] [--folder build/soak/fixes]

The changes are made in a copy of the repository. Results are kept in the folder, by the text of the change, its file
and the test's file: an interrupted campaign continues. Exit code 1 if a test passes without its fix, or cannot run.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY), str(Path(__file__).parent)]

from log_fixes import LOG_FIXES, Fix  # noqa: E402
from mutants import planted  # noqa: E402
from role_fixes import ROLE_FIXES  # noqa: E402

from infra.files import write_atomically  # noqa: E402

FIXES = (*LOG_FIXES, *ROLE_FIXES)
TIMEOUT_S = 1800
TESTS_FAILED = 1
"""Pytest's exit code: tests ran, and some of them failed."""
IMPORTED_BEFORE = "ignore::pytest.PytestAssertRewriteWarning"
"""Pytest warns of plugins imported before its start."""
OURS = frozenset({"schemas", "infra", "operators", "pipelines", "mutants", "log_fixes", "role_fixes"})
LIBRARIES = ("apache_beam", "hypothesis", "kafka", "numpy", "pyarrow", "rich", "torch", "transformers", "typer")
"""Imported once: the tests run in forks."""


def copy_repository(tree: Path) -> None:
    """Copy the files that git knows to the new folder `tree`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
    )
    shutil.rmtree(tree, ignore_errors=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (REPOSITORY / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, tree / name)


def without(fix: Fix, tree: Path, log: Path) -> str:
    """What the test of `fix` does in `tree` without it: "fails", "PASSES" or "cannot run"; its output is in `log`."""
    file = tree / fix.file
    source = file.read_text()
    file.write_text(planted(source, fix.what, fix.changes).source)
    try:
        code = in_fork(lambda: pytest_code(fix.test, tree, log))
    finally:
        file.write_text(source)
    return {0: "PASSES", TESTS_FAILED: "fails", -signal.SIGALRM: "fails"}.get(code, f"cannot run: see {log}")


def pytest_code(test: str, tree: Path, log: Path) -> int:
    """Run `test` of `tree` in this process, with its output in `log`; return pytest's exit code."""
    with log.open("w") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if Path(path) not in (REPOSITORY, Path(__file__).parent))]
    sys.dont_write_bytecode = True
    return int(pytest.main(["-x", "-p", "no:cacheprovider", "-m", "not soak", "-W", IMPORTED_BEFORE, test]))


def in_fork(work: Callable[[], int]) -> int:
    """The result of `work` in a fork of this process, which has imported the libraries; -14 after TIMEOUT_S."""
    if (child := os.fork()) == 0:
        try:
            signal.alarm(TIMEOUT_S)
            os._exit(work())
        finally:
            os._exit(os.EX_SOFTWARE)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> int:
    """Run the missing tests; print one line for each fix."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "build" / "soak" / "fixes")
    parser.add_argument("--only", nargs="*", default=[""], metavar="WORD", help="fixes whose text contains a WORD")
    options = parser.parse_args()
    folder = options.folder.absolute()
    copy_repository(folder / "tree")
    for name in LIBRARIES:
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]
    results_file = folder / "results.json"
    results: dict[str, dict[str, str]] = json.loads(results_file.read_text()) if results_file.exists() else {}
    bad = 0
    for fix in FIXES:
        if not any(word in fix.what for word in options.only):
            continue
        test_file = (REPOSITORY / fix.test.partition("::")[0]).read_bytes()
        contents = repr(fix).encode() + (REPOSITORY / fix.file).read_bytes() + test_file
        key, began = hashlib.sha256(contents).hexdigest()[:16], time.monotonic()
        if results.get(key, {}).get("test") != "fails":
            log = folder / f"{key}.log"
            results[key] = {"fix": fix.what, "log": str(log), "test": without(fix, folder / "tree", log)}
            write_atomically(results_file, json.dumps(results, indent=1))
        bad += results[key]["test"] != "fails"
        print(f"{results[key]['test']}: {fix.what} ({fix.test}, {time.monotonic() - began:.0f} s)", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
