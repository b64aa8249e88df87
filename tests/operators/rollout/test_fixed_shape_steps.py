"""Steps in fixed shapes, as a GPU replays them, give the same logits and tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_engines import engine, kv_slots, mixed, run
from tiny_models import VOCABULARY, tiny_model

from operators.rollout import cuda_graphs, direct_runner
from operators.rollout.cuda_graphs import FixedShapeSteps, Record, Run, round_up, without_recording
from operators.rollout.direct_runner import DirectRunner
from operators.rollout.step_plan import Decode, plan_prefill


@pytest.mark.parametrize(("number", "rounded"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16), (17, 20), (20, 20)])
def test_round_up_returns_the_next_shape(number: int, rounded: int) -> None:
    assert round_up(number, 4, 20) == rounded


def test_fixed_shape_steps_use_few_shapes() -> None:
    asked: set[tuple[int, int]] = set()

    def compute(token_ids: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
        asked.add((len(token_ids), width))
        assert width > int(positions.max())
        return torch.nn.functional.one_hot(token_ids, 100)

    steps = FixedShapeSteps(compute, rows=20, context=1000, device=torch.device("cpu"), record=without_recording)
    drawn = np.random.default_rng(0)
    for _ in range(500):
        count = drawn.integers(1, 21)
        step = Decode(drawn.integers(0, 100, count), drawn.integers(0, 1000, count))
        assert steps.decode(step).argmax(-1).tolist() == step.token_ids.tolist()
    assert asked <= {(rows, width) for rows in (4, 8, 16, 20) for width in (128, 256, 512, 1000)}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_fixed_shapes_do_not_change_logits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different lengths, around the length at which the width doubles."""
    monkeypatch.setattr(cuda_graphs, "LEAST_WIDTH", 8)
    lengths = [3, 14, 7, 10, 1]
    drawn = np.random.default_rng(1)
    contexts = [drawn.integers(0, VOCABULARY, length + 3) for length in lengths]
    logits = []
    for fixed in (False, True):
        model = tiny_model(family)
        slots = kv_slots(model)
        slots.tensor.fill_(7.0)  # stale values of earlier rows
        runner = DirectRunner(model, slots, fixed=fixed)
        with torch.inference_mode():
            held = [each[:length] for each, length in zip(contexts, lengths, strict=True)]
            runner.prefill(plan_prefill(held, list(range(len(held))), 1 << 20))
            for step in range(3):
                at = np.array(lengths) + step
                tokens = np.array([each[place] for each, place in zip(contexts, at, strict=True)])
                logits.append(runner.decode(Decode(tokens, at)).clone())
    for plain, fixed_ones in zip(logits[:3], logits[3:], strict=True):
        assert (plain - fixed_ones).abs().max() <= 1e-5 * plain.abs().max()


LEFT_BEHIND: list[torch.Tensor] = []


def in_one_place(run: Run) -> Run:
    """Behaves like a graph: each replay writes into the first result's memory, which other graphs share."""
    result = run()

    def again() -> torch.Tensor:
        for each in LEFT_BEHIND:
            each.fill_(torch.nan)
        return result.copy_(run())

    LEFT_BEHIND.append(result)
    return again


@pytest.mark.parametrize("record", [without_recording, in_one_place])
def test_fixed_shapes_do_not_change_tokens(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests arrive, end and move rows, while each step also writes into free KV rows."""
    monkeypatch.setattr(direct_runner, "without_recording", record)
    LEFT_BEHIND.clear()
    requests = mixed(30)
    plain, fixed = run(engine(slots=6), requests), run(engine(slots=6, fixed=True), requests)
    assert {name: each.generated.token_ids.tolist() for name, each in fixed.items()} == {
        name: each.generated.token_ids.tolist() for name, each in plain.items()
    }
