"""Decode steps in a few fixed shapes, each recorded once and then replayed: on a GPU as CUDA graphs.

On a GPU the kernels of a decode step take less time than launching them one by one. A graph launches all at once, but
has one shape and one input buffer: so the step's rows and its longest context are rounded up to a shape, and its tokens
are copied into the input buffer. The additional rows write into free KV rows, and their results are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from operators.rollout.step_plan import Decode

Run = Callable[[], torch.Tensor]

_WARM_UPS = 2


class CudaGraphs:
    """Records on the current device. All graphs share one memory pool: only one of them may run at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, run: Run) -> Run:
        """A function that replays `run`: the same kernels on the same memory, with the result in the same tensor.

        `run` must not depend on values: it neither waits for a value nor reads one.
        """
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):  # the first calls initialise libraries, which must not be recorded
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(side_stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as those of a stage group, may allocate memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        self._pool = graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


LEAST_ROWS, LEAST_WIDTH = 4, 128
"""The smallest shape; the others are doublings of it."""

Compute = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Logits [rows, vocabulary] of tokens and positions, int64[rows] each; the third argument is the number of KV positions
attended over."""

Record = Callable[[Run], Run]
"""Turns a computation into one that replays it: `CudaGraphs.record`, `without_recording`."""


def without_recording(run: Run) -> Run:
    """`run` itself, for devices without graphs."""
    return run


class FixedShapeSteps:
    """Runs steps of at most `rows` rows over `context` positions on `device`, by replays of `compute`.

    The next step may overwrite the result.
    """

    def __init__(self, compute: Compute, rows: int, context: int, device: torch.device, record: Record) -> None:
        self._compute, self._most_rows, self._context, self._record = compute, rows, context, record
        self._token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._recorded: dict[tuple[int, int], Run] = {}

    def decode(self, step: Decode) -> torch.Tensor:
        """The logits of `step`, [rows of the step, vocabulary]."""
        count = len(step.token_ids)
        rows = round_up(count, LEAST_ROWS, self._most_rows)
        width = round_up(int(step.positions.max()) + 1, LEAST_WIDTH, self._context)
        self._token_ids[:count].copy_(torch.from_numpy(step.token_ids), non_blocking=True)
        self._positions[:count].copy_(torch.from_numpy(step.positions), non_blocking=True)
        self._positions[count:rows] = 0
        if (rows, width) not in self._recorded:
            self._recorded[rows, width] = self._record(partial(self._run, rows, width))
        return self._recorded[rows, width]()[:count]

    def _run(self, rows: int, width: int) -> torch.Tensor:
        return self._compute(self._token_ids[:rows], self._positions[:rows], width)


def round_up(number: int, least: int, most: int) -> int:
    """`least` doubled until it is `number` or more, at most `most`."""
    return min(most, least << max(0, -(-number // least) - 1).bit_length())
