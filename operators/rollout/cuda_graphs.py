"""Computations recorded as CUDA graphs, which launch all their kernels at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Run = Callable[[], torch.Tensor]

_WARM_UPS = 2


class CudaGraphs:
    """Records on the current device. All graphs share their memory: one of them runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, run: Run) -> Run:
        """What repeats `run`, with the same kernels on the same memory, and leaves its result in the same tensor.

        `run` must do the same whatever it computes with: it waits for no value and looks at none.
        """
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # what libraries set up at first must not be recorded
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = run()
        self._pool = graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay
