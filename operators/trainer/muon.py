"""Muon (Jordan et al., 2024), in float32: momentum, orthogonalised by Newton-Schulz iterations.

torch.optim.Muon iterates in bfloat16. A CPU without bfloat16 instructions emulates it fourteen times slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Orthogonalised Nesterov momentum of matrices. Learning rates are comparable with AdamW's for every shape: updates
    are scaled to a root mean square of 0.2 (Liu et al., 2025).
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for matrix in (p for p in group["params"] if p.grad is not None):
                state = self.state[matrix]
                if not state:
                    state["momentum"] = torch.zeros_like(matrix)
                average = state["momentum"].lerp_(matrix.grad, 1 - group["momentum"])
                ahead = matrix.grad.lerp(average, group["momentum"])
                matrix.add_(orthogonalised(ahead), alpha=-group["lr"] * 0.2 * max(matrix.shape) ** 0.5)


def orthogonalised(matrix: Tensor) -> Tensor:
    """`matrix` [rows, columns] with its singular values moved to between 0.7 and 1.2 by a quintic iteration."""
    a, b, c = _COEFFICIENTS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(_ITERATIONS):
        gram = wide @ wide.mT
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.mT
