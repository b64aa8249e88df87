"""Muon compared with torch's implementation, and properties of its updates."""

from __future__ import annotations

import pytest
import torch

from operators.trainer.imitation import Muon, orthogonalised


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)])
def test_orthogonalised_has_singular_values_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 7
    values = torch.linalg.svdvals(orthogonalised(matrix))
    assert values.max() < 1.25
    assert values.min() > 0.5


@pytest.mark.parametrize("shape", [(16, 8), (8, 16)])
def test_muon_updates_match_torch_up_to_bfloat16(shape: tuple[int, int]) -> None:
    noise = torch.Generator().manual_seed(1)
    ours, theirs = (torch.nn.Parameter(torch.zeros(shape)) for _ in range(2))
    optimizers = (
        Muon([ours], 0.1),
        torch.optim.Muon([theirs], lr=0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(4):
        ours.grad = torch.randn(shape, generator=noise)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert ours.abs().mean() > 0.01
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.005)


def test_muon_skips_a_matrix_without_gradient() -> None:
    matrix = torch.nn.Parameter(torch.ones(2, 3))
    Muon([matrix], 1.0).step()
    assert torch.equal(matrix.detach(), torch.ones(2, 3))
