"""Runs the named test of each planted fault with the fault, in forks of one process.

python planted_faults.py FOLDER

FOLDER/failed.json then has, by the fault's name, the test that failed, "-" if it passed; under "none" the first of all
named tests that fails without a fault.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE)]

from forked_tests import ForkedTests  # noqa: E402
from mutants import PLANTED, planted  # noqa: E402
from swapped_code import swap_code  # noqa: E402

IMPORTED_BEFORE = "ignore::pytest.PytestAssertRewriteWarning"
"""Pytest warns of plugins imported before its start."""
LIMIT_S = 120.0
NO_FAULT = "none"


def run_named_tests(folder: Path, tests: ForkedTests) -> int:
    """Write which named tests fail."""
    failed = {NO_FAULT: tests.first_failure({test: LIMIT_S for *_, test in PLANTED}, lambda: None)}
    for module, what, changes, test in PLANTED:
        loaded = importlib.import_module(f"operators.trainer.{module}")
        source = planted(Path(str(loaded.__file__)).read_text(), what, changes).source
        failed[what] = tests.first_failure({test: LIMIT_S}, functools.partial(swap_code, loaded, source))
    (folder / "failed.json").write_text(json.dumps(failed))
    return 0


def main(folder: Path) -> int:
    """Collect the named tests, without the common fixtures, which import Beam, and run them."""
    tests = ForkedTests(functools.partial(run_named_tests, folder), {})
    ignored = ["-W", IMPORTED_BEFORE, "-W", "ignore::DeprecationWarning"]  # kafka-python's, at its import
    settings = ["-s", "--noconftest", "-p", "no:cacheprovider", f"--basetemp={folder / 'tmp'}", *ignored]
    pytest.main([*settings, *sorted({test for *_, test in PLANTED})], plugins=[tests])
    return tests.code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
