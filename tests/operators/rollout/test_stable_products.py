"""A response has the same tokens and logprobs, bit for bit, whatever is computed with it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from summation_orders import sums_in_one_order
from tiny_engines import request, run
from tiny_models import GQA
from transformers import LlamaConfig, LlamaForCausalLM

from operators.rollout.stable_products import (
    JOINT_WIDTH,
    LEAST_ROWS,
    MOST_ROWS,
    attention_parts,
    least_rows,
    least_width,
    weighted_sums,
)
from operators.rollout.step_plan import plan_prefill
from operators.rollout.transformers_engine import TransformersEngine

CONTEXT = 640
LONG = GQA | {"max_position_embeddings": CONTEXT, "initializer_range": 0.1}
SHAPES = {
    "narrow": {"hidden_size": 48, "intermediate_size": 96, "head_dim": 32},
    "wide": {"hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6, "head_dim": 64},
    "odd": {"hidden_size": 100, "intermediate_size": 190, "head_dim": 20},
}
LENGTHS = (1, 3, 17, 40, 64, 65, 90, 120, 250, 300, 390, 500, 600)
CPU = torch.device("cpu")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """With several threads the parts of a product depend on its rows."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES)
def test_logprobs_do_not_depend_on_the_batch(one_thread: None, shape: str) -> None:
    widths = {size for name, size in SHAPES[shape].items() if name.endswith("size")}
    if not sums_in_one_order(torch.float32, *widths):
        pytest.skip("matrix products of this machine depend on the number of their rows")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LONG | SHAPES[shape])).eval()
    asked = [request(3 * i, new=20, prompt=length) for i, length in enumerate(LENGTHS)]
    expected = run(TransformersEngine(model, slots=len(asked)), asked)
    for slots in (1, 3, 5):
        found = run(TransformersEngine(model, slots=slots), asked)
        for name, completion in expected.items():
            assert found[name].generated.token_ids.tolist() == completion.generated.token_ids.tolist(), (slots, name)
            assert found[name].generated.logprobs.tolist() == completion.generated.logprobs.tolist(), (slots, name)


def test_bounds_are_found_by_computing(one_thread: None) -> None:
    """From the bound on products have the bits of larger ones; one row or width less, if allowed, has others."""
    generator = torch.Generator().manual_seed(1)
    for inputs in (32, 130, 700):
        rows = least_rows(inputs, torch.float32, "cpu")
        assert LEAST_ROWS <= rows <= MOST_ROWS
        x, weight = (torch.randn(n, inputs, generator=generator) for n in (MOST_ROWS, 50))
        whole = torch.nn.functional.linear(x, weight)
        for n in range(rows, MOST_ROWS):
            assert torch.equal(torch.nn.functional.linear(x[:n], weight), whole[:n])
        below = torch.nn.functional.linear(x[: rows - 1], weight)
        assert rows == LEAST_ROWS or not torch.equal(below, whole[: rows - 1])
    width = least_width(7, 128, 128**-0.5, torch.float32, "cpu")
    assert width % 16 == 0
    assert least_rows(700, torch.float32, "cuda") == LEAST_ROWS
    assert least_width(7, 128, 128**-0.5, torch.float32, "cuda") == 16


def test_weighted_sums_are_products(one_thread: None) -> None:
    generator = torch.Generator().manual_seed(2)
    weights, values = (torch.randn(3, *shape, generator=generator) for shape in ((2, 600), (600, 32)))
    found = weighted_sums(weights, values)
    assert torch.allclose(found, weights @ values, atol=1e-4)
    out = torch.empty_like(found)
    weighted_sums(weights, values, out=out)
    assert torch.equal(out, found)
    assert torch.equal(weighted_sums(weights.bfloat16(), values.bfloat16()), weights.bfloat16() @ values.bfloat16())


def test_long_contexts_attend_only_with_equals() -> None:
    generator = np.random.default_rng(0)
    contexts = [generator.integers(1, 9, length) for length in (200, 129, 199, 160, 130, 193)]
    [block] = plan_prefill(contexts, range(6), max_tokens=1 << 20)
    assert attention_parts(block, CPU) == [(0, 3, 200), (3, 4, 160), (4, 6, 144)]
    assert attention_parts(block, torch.device("cuda")) == [(0, 6, 200)]
    [short] = plan_prefill([generator.integers(1, 9, n) for n in (JOINT_WIDTH, 50)], range(2), max_tokens=1 << 20)
    assert attention_parts(short, CPU) == [(0, 2, JOINT_WIDTH)]
