"""The cost of a program in the sandbox: seconds per call of run_python and of the verifier `code`, on one core and all.

`python -m benchmarks.sandbox [--calls N] [--processes N]`
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable

from infra.sandbox.run import Limits, run_python
from operators.score.verifiers.code import verify

_ANSWER = "def double(x):\n    return x + x\n"
_STATEMENTS = {"tests": ["assert double(2) == 4", "assert double('a') == 'aa'", "assert double([1]) == [1, 1]"]}
_PAIRS = {"tests": [{"input": "1 2\n", "output": "3"}]}


def _empty() -> None:
    assert run_python("", limits=Limits(seconds=20.0)).status == 0


def _statements() -> None:
    assert verify(_ANSWER, _STATEMENTS, 20.0, 512) == 1.0


def _pairs() -> None:
    assert verify("print(sum(map(int, input().split())))", _PAIRS, 20.0, 512) == 1.0


CASES: dict[str, Callable[[], None]] = {
    "an empty program": _empty,
    "three statements": _statements,
    "one input and output": _pairs,
}


def _times(name: str, calls: int) -> list[float]:
    call = CASES[name]
    call()
    taken = []
    for _ in range(calls):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return taken


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    print(f"{'case':<24}{'median ms':>10}{'p95 ms':>9}{'calls/s':>9}{f'calls/s, {options.processes} processes':>23}")
    for name in CASES:
        taken = _times(name, options.calls)
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            started = time.perf_counter()
            pool.starmap(_times, [(name, options.calls)] * options.processes, chunksize=1)
            together = (options.calls + 1) * options.processes / (time.perf_counter() - started)
        p95 = statistics.quantiles(taken, n=20)[-1]
        middle = statistics.median(taken)
        print(f"{name:<24}{middle * 1e3:>10.1f}{p95 * 1e3:>9.1f}{1 / statistics.mean(taken):>9.1f}{together:>23.1f}")


if __name__ == "__main__":
    main()
