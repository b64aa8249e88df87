"""Decode steps in a few fixed shapes, each recorded once as a CUDA graph and replayed from then on.

On a GPU the kernels of a decode step are shorter than it takes to launch them one by one. A graph launches all at once,
but knows one shape and one place for each input: so the step's rows and its longest context are rounded up to a shape,
and its tokens are copied to where the graphs read them. Rows beyond the step's own compute what nobody reads, into KV
rows that are free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from operators.rollout.step_plan import Decode

LEAST_ROWS, LEAST_WIDTH = 4, 128
"""The smallest shape; others are twice as large, and twice that."""

_WARM_UPS = 2

Compute = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Logits [rows, vocabulary] of tokens and positions, int64[rows] each, attending over so many positions of the KV."""


class FixedSteps:
    """Runs steps of at most `rows` rows over `context` positions through `compute`, on `device`.

    What it returns is overwritten by the next step of the same shape. On a CPU, which records nothing, `compute` is
    called each time with the same shapes.
    """

    def __init__(self, compute: Compute, rows: int, context: int, device: torch.device) -> None:
        self._compute, self._most_rows, self._context = compute, rows, context
        self._device = device
        self._token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._graphs: dict[tuple[int, int], tuple[Any, torch.Tensor]] = {}
        self._pool: Any = None

    def decode(self, step: Decode) -> torch.Tensor:
        """The logits of `step`, [its rows, vocabulary]."""
        count = len(step.token_ids)
        rows = round_up(count, LEAST_ROWS, self._most_rows)
        width = round_up(int(step.positions.max()) + 1, LEAST_WIDTH, self._context)
        self._token_ids[:count] = torch.from_numpy(step.token_ids)
        self._positions[:count] = torch.from_numpy(step.positions)
        self._positions[count:rows] = 0
        if self._device.type != "cuda":
            return self._run(rows, width)[:count]
        if (rows, width) not in self._graphs:
            self._graphs[rows, width] = self._record(rows, width)
        graph, logits = self._graphs[rows, width]
        graph.replay()
        return logits[:count]

    def _run(self, rows: int, width: int) -> torch.Tensor:
        return self._compute(self._token_ids[:rows], self._positions[:rows], width)

    def _record(self, rows: int, width: int) -> tuple[Any, torch.Tensor]:
        """A graph of a step, and where it leaves the logits. All graphs share memory: one runs at a time."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # what libraries set up at first must not be recorded
            for _ in range(_WARM_UPS):
                self._run(rows, width)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._run(rows, width)
        self._pool = graph.pool()
        return graph, logits


def round_up(number: int, least: int, most: int) -> int:
    """`least` doubled until it is `number` or more, at most `most`."""
    return min(most, least << max(0, -(-number // least) - 1).bit_length())
