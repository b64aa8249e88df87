"""The benchmark of tasks that were not tuned: one tiny cell, and the phrases that become tokens."""

from __future__ import annotations

import pytest

from benchmarks.untuned import TASKS, measure, repeated, show
from infra.models.demo_config import DemoModelConfig
from operators.trainer.warm_start_config import WarmStartConfig

TINY = WarmStartConfig(
    model=DemoModelConfig(hidden_size=16, layers=1, heads=2, kv_heads=1, mlp_size=16), examples=32, steps=2, batch=2
)
CHANGES = [
    "prompts.samples_per_prompt=2", "experience.global_batch=4", "trainer.optimizer_steps=2",
    "prompts.max_new_tokens=2", "rollout.slots=8",
]  # fmt: skip


@pytest.mark.parametrize("task", TASKS[:1])
def test_untuned_measures_before_and_after(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = measure(task, 0, 4, TINY, CHANGES)
    assert all(len(result[key]) == 2 for key in ("reward", "greedy", "training"))
    show({task: {key: [value] for key, value in result.items()}})
    assert task in capsys.readouterr().out


@pytest.mark.parametrize(
    ("texts", "phrases"),
    [
        (["Add 12 and 3, please.", "Add 14 and 5, please."], ("Add ", ", please.")),
        (["LCM: 3, 4", "LCM: 5, 6"], ("LCM: ",)),
        (["1", "2"], ()),
    ],
)
def test_repeated_finds_the_common_beginning_and_end(texts: list[str], phrases: tuple[str, ...]) -> None:
    assert repeated(texts) == phrases
