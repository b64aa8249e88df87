"""The target set-ups of docs/training.md as configurations: their GPUs are divided, and ranks and replicas fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.models.sizes import kv_values
from operators.rollout.replica_memory import ReplicaMemory
from operators.trainer.memory_plan import TARGETS, Target, plan_rank, shape_of_config
from pipelines.config import load_config
from pipelines.run.preflight import gpu_problems
from pipelines.sequence_lengths import longest_sequence

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

    memory = ReplicaMemory(shape.parameters, kv_values(target.config), rollout.weights_dtype)
    needed = memory.weights + memory.kv(rollout.most_slots * config.context)
    usable = float(rollout.vllm["gpu_memory_utilization"]) * GPU_BYTES - 4 * 10**9  # vLLM's activations
    assert needed / rollout.tensor_parallel < usable
    tokens = f"{rollout.most_slots} × {config.context}"
    sizes = [each / rollout.tensor_parallel / 10**9 for each in (memory.weights, needed - memory.weights, needed)]
    cells = [target.model, str(rollout.tensor_parallel), tokens, *(f"{size:.1f}" for size in sizes)]
    assert f"| {' | '.join(cells)} |" in (ROOT / "docs" / "training.md").read_text().splitlines()
