"""Does a program pass its tests? It runs in a sandbox, once for all tests or once for each.

A program that ends before its time, prints what it likes or never ends passes nothing by that. It shares its process
with tests that are statements, though: one that looks for how its success is reported can forge it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from infra.sandbox.run import Limits, run_python

_HARNESS = """
import json, os, sys
def run():
    job = json.loads(sys.stdin.readline())
    reports = os.dup(1)
    with open(os.devnull, "r+b", buffering=0) as nowhere:
        for descriptor in (0, 1, 2):
            os.dup2(nowhere.fileno(), descriptor)
    space = {"__name__": "__main__"}
    exec(compile(job["answer"], "<answer>", "exec"), space)
    for number, test in enumerate(job["tests"]):
        try:
            exec(compile(test, f"<test {number}>", "exec"), space)
        except BaseException:
            continue
        os.write(reports, job["passed"].encode())
run()
"""


def prepare() -> None:
    """Raises SandboxUnavailable where programs cannot be confined."""
    run_python("", limits=Limits(seconds=30.0))


def verify(
    answer: str | None, reference: Mapping[str, Any], seconds: float, memory_mb: int, partial: bool = False
) -> float:
    """1 if the program `answer` passes all tests of `reference`, else 0; the share that it passes if `partial`.

    `reference["tests"]` is Python that raises where the program is wrong (a string, or a list of them, each a test), or
    a list of mappings with `input`, given on standard input, and the `output` expected, white space at the ends of its
    lines apart. All tests together have `seconds`. Raises ValueError where there are no such tests.
    """
    tests = _tests(reference)
    if not answer:
        return 0.0
    run = _count_statements if isinstance(tests[0], str) else _count_outputs
    passed = run(answer, tests, Limits(seconds=seconds, memory_mb=memory_mb))
    return passed / len(tests) if partial else float(passed == len(tests))


def _tests(reference: Mapping[str, Any]) -> Sequence[Any]:
    given = reference.get("tests")
    tests = [given] if isinstance(given, str) else given
    if not isinstance(tests, list) or not tests:
        raise ValueError("the reference has no tests")
    statements = all(isinstance(test, str) for test in tests)
    if not statements and not all(isinstance(test, dict) and {"input", "output"} <= set(test) for test in tests):
        raise ValueError("tests must all be Python, or all have input and output")
    return tests


def _count_statements(answer: str, tests: Sequence[str], limits: Limits) -> int:
    passed = secrets.token_hex(16)  # what the program prints must not be taken for a report
    job = json.dumps({"answer": answer, "tests": tests, "passed": passed})
    ran = run_python(_HARNESS, job.encode() + b"\n", limits)
    return min(ran.output.count(passed.encode()), len(tests))


def _count_outputs(answer: str, tests: Sequence[Mapping[str, Any]], limits: Limits) -> int:
    passed, left = 0, limits.seconds
    for test in tests:
        if left <= 0:
            break
        ran = run_python(answer, str(test["input"]).encode(), Limits(left, limits.memory_mb))
        left -= ran.seconds
        right = _lines(ran.output) == _lines(str(test["output"]).encode())
        passed += ran.ended == "exited" and ran.status == 0 and right
    return passed


def _lines(text: bytes) -> list[bytes]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
