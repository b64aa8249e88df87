"""verl's results for random batches, the vectors of tests/operators/trainer/test_losses_against_verl.py.

    make verl-vectors

Runs in its own virtual environment (`make verl-env`) and imports none of this project's code. Every batch has a mask
with gaps, and values that each algorithm clips. Tensors are packed: only trained tokens, sequence after sequence, batch
after batch. The file's metadata has its origin and each algorithm's settings, with the names of `AlgorithmConfig`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from collections import defaultdict
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import ActorConfig

CASES, GROUPS, SAMPLES, WIDTH, LONGEST = 60, 3, 4, 10, 8
VALUE_CLIP = 0.3
NO_DUAL_CLIP = 1e9
MODES = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "constant_length": "seq-mean-token-sum-norm",
}
TOKEN = {"aggregation": "token_mean"}
SEQUENCE = {"aggregation": "sequence_mean"}
NARROW, HIGHER = {"clip_low": 0.2, "clip_high": 0.2}, {"clip_low": 0.2, "clip_high": 0.28}
DECOUPLED = {**TOKEN, **HIGHER, "proximal": "update_start"}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo", **SEQUENCE, **HIGHER},
    "grpo, dual clip": {"name": "grpo", **SEQUENCE, **HIGHER, "dual_clip": 1.2},
    "dr_grpo": {"name": "dr_grpo", "aggregation": "constant_length", "max_response_tokens": LONGEST, **NARROW},
    "dapo": {"name": "dapo", **TOKEN, **HIGHER},
    "rloo": {"name": "rloo", **SEQUENCE, **NARROW},
    "reinforce_plus_plus": {"name": "reinforce_plus_plus", **TOKEN, **NARROW, "discount": 0.97},
    "reinforce_plus_plus, kl in reward": {
        "name": "reinforce_plus_plus", **TOKEN, **NARROW, "kl_in": "reward", "kl_kind": "k2", "kl_coefficient": 0.2
    },
    "reinforce_plus_plus_baseline": {"name": "reinforce_plus_plus_baseline", **TOKEN, **NARROW},
    "gspo": {"name": "gspo", **SEQUENCE, "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"name": "cispo", **TOKEN, **HIGHER},
    "decoupled_ppo": {"name": "decoupled_ppo", **DECOUPLED, "correction": "truncate", "correction_cap": 1.4},
    "decoupled_ppo, mask": {"name": "decoupled_ppo", **DECOUPLED, "correction": "mask", "correction_cap": 1.4},
    "tis": {"name": "tis", **DECOUPLED, "correction": "truncate", "correction_cap": 1.2},
    "tis, sequence": {
        "name": "tis", **DECOUPLED, "correction": "truncate", "correction_level": "sequence", "correction_cap": 1.2
    },
    "icepop": {"name": "icepop", **DECOUPLED, "correction": "mask", "correction_low": 0.7, "correction_cap": 1.4},
    "ppo": {"name": "ppo", **TOKEN, **NARROW, "discount": 0.98, "gae_lambda": 0.9},
    "ppo, kl in reward": {
        "name": "ppo", **TOKEN, **NARROW, "kl_in": "reward", "kl_kind": "k1", "kl_coefficient": 0.2, "gae_lambda": 0.9
    },
}  # fmt: skip


class Batch:
    """A random batch, [rows, WIDTH] in float64 of values that float32 holds."""

    def __init__(self, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        rows = GROUPS * SAMPLES
        shape = (rows, WIDTH)

        def normal(spread: float) -> Tensor:
            return spread * torch.randn(shape, generator=source)

        self.lengths = torch.randint(1, LONGEST + 1, (rows,), generator=source)
        order = torch.rand(shape, generator=source).argsort(1).argsort(1)
        self.mask = (order < self.lengths[:, None]).double()
        self.groups = torch.arange(rows) % GROUPS
        self.rewards = (torch.rand(rows, generator=source) * 4).round().double() / 4
        proximal = -torch.rand(shape, generator=source) * 3
        self.tokens = {
            "proximal": proximal,
            "current": proximal + normal(0.35),
            "behaviour": proximal + normal(0.35),
            "reference": proximal + normal(0.35),
            "values": normal(0.5),
            "new_values": normal(0.5),
        }

    def of(self, name: str, contiguous: bool = False) -> Tensor:
        """A column; with `contiguous`, its trained tokens are shifted together to the left."""
        column = self.tokens[name].float().double()
        return column.clone() if not contiguous else self.moved(column)

    def moved(self, column: Tensor) -> Tensor:
        """The trained tokens of `column`, shifted together to the left."""
        together = torch.zeros_like(column)
        together[self.together().bool()] = column[self.mask.bool()]
        return together

    def together(self) -> Tensor:
        """The mask of the columns that `moved` returns."""
        return (torch.arange(WIDTH) < self.lengths[:, None]).double()


def main() -> None:
    """Compute the vectors and write them."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("out", type=Path)
    out = arguments.parse_args().out
    made: dict[str, list[Tensor]] = defaultdict(list)
    for answers in islice(filter(None, map(answers_to, map(Batch, count()))), CASES):
        for name, tensor in answers.items():
            made[name].append(tensor)
    metadata = {
        "source": f"verl {importlib.metadata.version('verl')}, core_algos and rollout_corr_helper",
        "torch": torch.__version__,
        "script": "benchmarks/verl/vectors.py",
        "cases": str(CASES),
        "rows": str(GROUPS * SAMPLES),
        "value_clip": str(VALUE_CLIP),
        "algorithms": json.dumps(ALGORITHMS),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.cat(tensors) for name, tensors in made.items()}, out, metadata)


def answers_to(batch: Batch) -> dict[str, Tensor] | None:
    """All of verl's results for `batch`; None if an algorithm clips nothing in it."""
    kept = batch.mask.bool()
    made = {"lengths": batch.lengths, "groups": batch.groups, "rewards": batch.rewards}
    made |= {name: batch.of(name)[kept].float() for name in batch.tokens}
    for label, settings in ALGORITHMS.items():
        advantages, returns = advantages_of(batch, settings)
        made[f"{label}/advantages"] = advantages[kept].float()
        found = [("", loss_of(batch, settings, advantages))]
        if returns is not None:
            made[f"{label}/returns"] = returns[kept].float()
            found.append(("value_", value_loss_of(batch, returns)))
        for what, answer in found:
            if answer is None:
                return None
            made[f"{label}/{what}loss"] = answer[0][None]
            made[f"{label}/{what}gradient"] = answer[1][kept].float()
    for kind in ("k1", "k2", "k3"):
        current = batch.of("current").requires_grad_()
        penalty = core_algos.kl_penalty(current, batch.of("reference"), kind)
        penalty.sum().backward()
        made[f"{kind}/penalty"] = penalty.detach()[kept].float()
        made[f"{kind}/gradient"] = current.grad[kept].float()
    return made


def advantages_of(batch: Batch, settings: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """verl's advantages and, for a critic's estimator, returns."""
    name, mask, index = settings["name"], batch.mask, batch.groups.numpy()
    token_rewards = torch.zeros_like(mask)
    last = WIDTH - 1 - mask.flip(1).argmax(1)
    token_rewards[torch.arange(len(mask)), last] = batch.rewards
    if settings.get("kl_in") == "reward":
        penalty = core_algos.kl_penalty(batch.of("proximal"), batch.of("reference"), settings["kl_kind"])
        token_rewards = token_rewards - settings["kl_coefficient"] * penalty * mask
    discount = settings.get("discount", 1.0)
    if name == "ppo":
        values = batch.of("values")
        return core_algos.compute_gae_advantage_return(token_rewards, values, mask, discount, settings["gae_lambda"])
    if name == "reinforce_plus_plus":  # verl begins a new return behind each gap, so it sees none
        given = batch.moved(token_rewards), batch.together()
        found = core_algos.compute_reinforce_plus_plus_outcome_advantage(*given, config=SimpleNamespace(gamma=discount))
        spread = torch.zeros_like(mask)
        spread[mask.bool()] = found[0][batch.together().bool()]
        return spread, None
    if name == "rloo":
        return core_algos.compute_rloo_outcome_advantage(token_rewards, mask, index)[0], None
    if name == "reinforce_plus_plus_baseline":
        return core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(token_rewards, mask, index)[0], None
    by_std = name != "dr_grpo"
    return core_algos.compute_grpo_outcome_advantage(token_rewards, mask, index, 1e-6, by_std)[0], None


def loss_of(batch: Batch, settings: dict[str, Any], advantages: Tensor) -> tuple[Tensor, Tensor] | None:
    """verl's loss and its gradient by the current logprobs; None if nothing is clipped or no weight is truncated."""
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=SAMPLES,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=settings["clip_low"],
        clip_ratio_low=settings["clip_low"],
        clip_ratio_high=settings["clip_high"],
        clip_ratio_c=settings.get("dual_clip", NO_DUAL_CLIP),
    )
    config.global_batch_info["loss_scale_factor"] = settings.get("max_response_tokens")
    losses = {"gspo": core_algos.compute_policy_loss_gspo, "cispo": core_algos.compute_policy_loss_cispo}
    compute = losses.get(settings["name"], core_algos.compute_policy_loss_vanilla)
    current, proximal = batch.of("current").requires_grad_(), batch.of("proximal")
    weights, free = weights_of(batch, settings), weights_of(batch, {**settings, "correction_cap": 1e9})
    mode = MODES[settings["aggregation"]]
    loss, metrics = compute(proximal, current, advantages, batch.mask, mode, config, rollout_is_weights=weights)
    dual = "dual_clip" not in settings or metrics["actor/pg_clipfrac_lower"] > 0
    if not metrics["actor/pg_clipfrac"] or not dual or (weights is not None and torch.equal(weights, free)):
        return None
    loss.backward()
    assert current.grad is not None
    return loss.detach(), current.grad


def weights_of(batch: Batch, settings: dict[str, Any]) -> Tensor | None:
    """verl's weights of off-policy tokens; None if the algorithm has none."""
    if "correction" not in settings:
        return None
    cap = settings["correction_cap"]
    masked = settings["correction"] == "mask"
    bounds: Any = f"{settings.get('correction_low', 1e-12)}_{cap}" if masked else cap
    level = settings.get("correction_level", "token")
    ratio = batch.of("proximal") - batch.of("behaviour")
    return compute_rollout_correction_weights(ratio, batch.mask, level, bounds)[0]


def value_loss_of(batch: Batch, returns: Tensor) -> tuple[Tensor, Tensor] | None:
    """verl's value loss and its gradient by the new values; None if no value is clipped."""
    new = batch.of("new_values").requires_grad_()
    loss, clipped = core_algos.compute_value_loss(new, returns, batch.of("values"), batch.mask, VALUE_CLIP)
    if not clipped:
        return None
    loss.backward()
    assert new.grad is not None
    return loss.detach(), new.grad


if __name__ == "__main__":
    main()
