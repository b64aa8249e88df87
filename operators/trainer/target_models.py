"""The set-ups for which the memory of the trainer is documented: shapes of published models, nodes and GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from operators.trainer.config import LearnerConfig
from operators.trainer.memory_plan import MemoryPlan, plan_memory, shape_of_config

GPU_BYTES = 80 * 10**9
LEARNER = LearnerConfig(
    precision="bfloat16", gradient_checkpointing=True, micro_batch_tokens=16_384, logits_chunk_tokens=2048
)


@dataclass(frozen=True, slots=True)
class Target:
    """A model on `nodes` machines with 8 GPUs of 80 GB each; `ranks` of the GPUs train, the others generate."""

    model: str
    nodes: int
    ranks: int
    config: dict[str, int | bool]

    def plan(self) -> MemoryPlan:
        """The memory of a rank with the settings `LEARNER`."""
        return plan_memory(shape_of_config(self.config), self.ranks, LEARNER)


def _dense(hidden: int, mlp: int, layers: int, heads: int, key_value_heads: int) -> dict[str, int | bool]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "vocab_size": 152_064,
    }


_EXPERTS = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
TARGETS = (
    Target("Qwen2.5-7B", 1, 4, _dense(3584, 18_944, 28, 28, 4)),
    Target("Qwen2.5-32B", 4, 16, _dense(5120, 27_648, 64, 40, 8)),
    Target("Qwen2.5-72B", 16, 64, _dense(8192, 29_568, 80, 64, 8)),
    Target("Qwen3-30B-A3B", 2, 12, _dense(2048, 6144, 48, 32, 4) | _EXPERTS | {"vocab_size": 151_936}),
)
