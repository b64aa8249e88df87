"""Records computations as CUDA graphs, which launch all their kernels at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
        with torch.cuda.graph(graph, pool=self._pool):
            result = run()
        self._pool = graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay
