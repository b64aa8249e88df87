"""Scores of tokens: the kernels, interpreted on a CPU, against torch's operations, and what happens without them."""

from __future__ import annotations

import logging

import interpreted_kernels
import pytest
import torch
from torch import Tensor

from operators.trainer import token_scores
from operators.trainer.token_scores import check_scores, scores_by_torch

COMPARISON = """
import torch
from operators.trainer.score_kernels import scores_by_kernels
from operators.trainer.token_scores import check_scores, scores_by_torch

check_scores(scores_by_kernels, torch.device("cpu"))
source = torch.Generator().manual_seed(1)
weights = torch.tensor([1.0, -2.0, 0.5])
for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
    for vocabulary in (7, 4096, 9001):
        for temperatures in (None, torch.tensor([0.5, 1.0, 3.0])):
            logits = (5 * torch.randn(3, vocabulary, generator=source)).to(dtype)
            targets = torch.tensor([0, vocabulary - 1, vocabulary // 2])
            found = []
            for score in (scores_by_kernels, lambda *given: scores_by_torch(*given, with_entropy=True)):
                leaf = logits.clone().requires_grad_()
                logprobs, entropies = score(leaf, targets, temperatures)
                (weights * logprobs).sum().backward()
                assert not entropies.requires_grad and leaf.grad.dtype == dtype
                found.append((logprobs.detach(), entropies, leaf.grad.float()))
            for one, other in zip(*found):
                torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
masked = torch.tensor([[0.0, -torch.inf, 0.0]])
_, (entropy,) = scores_by_kernels(masked, torch.tensor([0]), None)
torch.testing.assert_close(entropy, torch.tensor(2.0).log())
logprobs, entropies = scores_by_kernels(torch.empty(0, 5, requires_grad=True), torch.empty(0, dtype=torch.int64), None)
logprobs.sum().backward()
print("equal")
"""


def test_kernels_score_tokens_as_torch_does() -> None:
    interpreted_kernels.assert_equal(COMPARISON)


def test_a_kernel_that_computes_something_else_is_found() -> None:
    def wrong(logits: Tensor, targets: Tensor, temperatures: Tensor | None) -> tuple[Tensor, Tensor]:
        return scores_by_torch(logits, targets, None, with_entropy=True)

    with pytest.raises(RuntimeError, match="the kernels' logprobs differ from torch's"):
        check_scores(wrong, torch.device("cpu"))


def test_without_kernels_torch_scores_tokens(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):  # Triton has no kernels for a CPU
        assert token_scores._kernels.__wrapped__(torch.device("cpu")) is None
    assert "tokens are scored by torch's operations, which take more time and memory" in caplog.text


class OnGpu(Tensor):
    """A tensor in host memory that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_kernels_score_tensors_of_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    scored = torch.ones(3), torch.ones(3)
    monkeypatch.setattr(token_scores, "_kernels", lambda device: lambda *given: scored)
    assert [token_scores.has_kernels(torch.device(kind)) for kind in ("cpu", "cuda")] == [False, True]
    logits, targets = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
    for with_entropy, expected in ((True, 3), (False, 0)):
        logprobs, entropies = token_scores.token_scores(
            logits.as_subclass(OnGpu), targets, None, with_entropy=with_entropy
        )
        assert logprobs is scored[0]
        assert len(entropies) == expected
        assert len(token_scores.token_scores(logits, targets, None, with_entropy=with_entropy)[1]) == expected
    assert token_scores.token_scores(logits, targets, None, with_entropy=True)[0] is not scored[0]
