"""Checks whether a program passes its tests. It runs in a sandbox, once for all statements or once for each input.

The program cannot read the expected results: outputs are compared in this process, and statements run in a second
sandbox, which uses the program's functions by proxy (infra/sandbox/remote.py). A program cannot pass a test by exiting
early, printing, patching its interpreter or never ending.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infra.sandbox.run import Limits, run_pair, run_python

_SILENCE = """
import os, laminar_remote
reports = os.dup(1)
with open(os.devnull, "r+b", buffering=0) as nowhere:
    for descriptor in (0, 1, 2):
        os.dup2(nowhere.fileno(), descriptor)
"""
_ANSWER = """
os.close(reports)
space = {"__name__": "__main__"}
exec(compile(answer, "<answer>", "exec"), space)
laminar_remote.RemotePeer(3).serve(space)
"""
_TESTS = """
peer = laminar_remote.RemotePeer(3, laminar_remote.offers)
space = laminar_remote.Names(peer, tests)
for number, test in enumerate(tests):
    try:
        exec(compile(test, f"<test {number}>", "exec"), space)
    except BaseException:
        continue
    if peer.connected:
        os.write(reports, b"+")
"""


def prepare() -> None:
    """Check that the sandbox works. Raises SandboxUnavailable if programs cannot be confined on this machine."""
    run_python("", limits=Limits(seconds=30.0))


def verify(
    answer: str | None, reference: Mapping[str, Any], seconds: float, memory_mb: int, partial: bool = False
) -> float:
    """1 if the program `answer` passes all tests of `reference`, else 0; with `partial`, the share of tests passed.

    `reference["tests"]` is Python that raises if the program is wrong (a string, or a list of strings, each a test), or
    a list of mappings with `input`, for standard input, and the expected `output`, compared without trailing white
    space of lines. `seconds` is the limit for all tests together. Raises ValueError without such tests.
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
        raise ValueError("the reference has no tests: name their column, tests, in prompts.extra_columns")
    statements = all(isinstance(test, str) for test in tests)
    if not statements and not all(isinstance(test, dict) and {"input", "output"} <= set(test) for test in tests):
        raise ValueError("tests must all be Python statements, or all have input and output")
    return tests


def _count_statements(answer: str, tests: Sequence[str], limits: Limits) -> int:
    program = f"answer = {answer!r}\n{_SILENCE}{_ANSWER}"
    ran = run_pair(program, f"tests = {list(tests)!r}\n{_SILENCE}{_TESTS}", limits)
    return min(len(ran.output), len(tests))


def _count_outputs(answer: str, tests: Sequence[Mapping[str, Any]], limits: Limits) -> int:
    passed, left = 0, limits.seconds
    for test in tests:
        if left <= 0:
            break
        ran = run_python(answer, str(test["input"]).encode(), Limits(left, limits.memory_mb))
        left -= ran.seconds
        equal = _lines(ran.output) == _lines(str(test["output"]).encode())
        passed += ran.ended == "exited" and ran.status == 0 and equal
    return passed


def _lines(text: bytes) -> list[bytes]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
