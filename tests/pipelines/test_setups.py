"""The target set-ups of docs/training.md as configurations: their GPUs are divided, and ranks and replicas fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from operators.trainer.memory_plan import TARGETS, Target, plan_rank, shape_of_config
from pipelines.config import load_config
from pipelines.run.preflight import gpu_problems
from pipelines.sequence_lengths import longest_sequence
from pipelines.setups import rollout_row

ROOT = Path(__file__).parents[2]
SETUPS = sorted((ROOT / "examples" / "setups").glob("*.toml"))
GPU_BYTES = 80 * 10**9


def test_each_target_has_a_setup_that_the_document_names() -> None:
    assert {setup.stem for setup in SETUPS} == {target.model.lower() for target in TARGETS}
    document = (ROOT / "docs" / "training.md").read_text()
    assert all(f"examples/setups/{setup.name}" in document for setup in SETUPS)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.model)
def test_setup_divides_the_gpus_and_fits_their_memory(target: Target) -> None:
    file = ROOT / "examples" / "setups" / f"{target.model.lower()}.toml"
    config = load_config(file)
    trainer, rollout = config.trainer, config.rollout
    shape = shape_of_config(target.config)
    assert (trainer.ranks, Path(config.model.path).name) == (target.ranks, target.model)
    assert plan_rank(shape, trainer, longest_sequence(config)) == target.plan()  # the documented one, which fits

    each = f"trainer.ranks={trainer.ranks // target.nodes}", f"rollout.processes={rollout.processes // target.nodes}"
    node, visible = load_config(file, each), tuple("01234567")
    assert list(gpu_problems(node, visible)) == []
    used = [gpu for process in range(node.rollout.processes) for gpu in node.rollout.gpus_of(process, visible)]
    used += [node.trainer.device_of(rank, visible).removeprefix("cuda:") for rank in range(node.trainer.ranks)]
    assert sorted(used) == list(visible)
    assert config.placement.max_replicas >= rollout.total_replicas

    row = rollout_row(target)
    shown = (row["gpus"], row["slots"], row["context"], "bfloat16")
    assert shown == (rollout.tensor_parallel, rollout.most_slots, config.context, rollout.weights_dtype)
    usable = float(rollout.vllm["gpu_memory_utilization"]) * GPU_BYTES - 4 * 10**9  # vLLM's activations
    assert float(row["total"]) * 10**9 < usable
    sizes = [f"{row[name]:.1f}" for name in ("weights", "kv", "total")]
    cells = [target.model, str(row["gpus"]), f"{row['slots']} × {row['context']}", *sizes]
    assert f"| {' | '.join(cells)} |" in (ROOT / "docs" / "training.md").read_text().splitlines()
