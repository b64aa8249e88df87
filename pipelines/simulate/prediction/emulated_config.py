"""The configuration of a run with a real engine as that of an emulated one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from operators.prompts.config import PromptsConfig
from operators.rollout.emulation_config import EngineEmulation
from operators.trainer.emulation import TrainerEmulation
from pipelines.config import Config


def emulated_config(
    config: Config, prompt_tokens: int, emulation: EngineEmulation, trainer: TrainerEmulation, **rollout: Any
) -> Config:
    """`config` with emulated engine and trainer, and prompts of `prompt_tokens` tokens; `rollout` are further changes.

    Its tasks become one, with the mixture's lengths; they have the same `samples_per_prompt`. GPUs, ranks and
    environments are left out: what they do is in the times.
    """
    tasks = config.prompts.mixture
    prompts = PromptsConfig(
        source="synthetic",
        prompt_tokens=prompt_tokens,
        max_new_tokens=max(task.max_new_tokens for task in tasks),
        samples_per_prompt=tasks[0].samples_per_prompt,
    )
    engine = {"engine": "emulated", "vllm": {}, "token_sampler": "laminar", "tensor_parallel": 1, "gpus": ()}
    return replace(
        config,
        prompts=prompts,
        score=replace(config.score, tasks=()),
        rollout=replace(config.rollout, emulation=emulation, **{**engine, "environments": (), **rollout}),
        trainer=replace(
            config.trainer, emulation=trainer, ranks=1, shard_ranks=0, context_ranks=1, batch_shares=0, gpus=()
        ),
        gateway=None,
        agents=None,
    )
