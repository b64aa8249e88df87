"""An oracle for updates: a plain float64 loop that shares only the model and the configuration with the trainer.

One sequence at a time through the model's own forward, without packing, micro-batches or coefficients: losses are
summed as the papers write them. w = π_o/μ, ρ = π/π_o.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from optimizer_steps import OptimizerStep, Tensors
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from operators.trainer.config import AlgorithmConfig, LearnerConfig
from schemas.records import MicroBatch

GROUP = {"grpo", "dapo", "gspo", "cispo", "decoupled_ppo", "tis", "icepop"}
SEQUENCE_MEAN = {"grpo", "gspo", "icepop"}
CLIPS = {"gspo": (3e-4, 4e-4), "rloo": (1.0, 1e9), "cispo": (1.0, 0.28), "tis": (0.2, 0.28), "dapo": (0.2, 0.28)}
CAPS = {"decoupled_ppo": 5.0, "icepop": 5.0}
STEPS = {"dr_grpo": 8, "dapo": 16, "reinforce_plus_plus": 8, "ppo": 4, "gspo": 4, "cispo": 16, "decoupled_ppo": 4}
"""The mini-batches of the papers; the others train a batch at once."""
F64 = torch.float64


@dataclass
class Line:
    """One sequence: its tokens, and the inputs of the formulas per trained token, float64[|y|]."""

    ids: Tensor
    mask: Tensor
    temperature: float
    reward: float
    group: str
    behaviour: Tensor
    proximal: Tensor = field(default_factory=lambda: torch.zeros(0))
    reference: Tensor | None = None
    values: Tensor = field(default_factory=lambda: torch.zeros(0))
    advantages: Tensor = field(default_factory=lambda: torch.zeros(0))
    returns: Tensor = field(default_factory=lambda: torch.zeros(0))

    def __len__(self) -> int:
        return len(self.behaviour)


@dataclass
class Seen:
    """Logprobs and entropies of a sequence's trained tokens in one optimizer step, float64[|y|]."""

    line: Line
    current: Tensor
    entropies: Tensor


@dataclass
class Expected:
    """Loss and gradient by name of each optimizer step, and the metrics of the update.

    `sizes` are the sums of the absolute losses of the tokens of a step, weighted as in its loss, to which rounding is
    relative.
    """

    losses: list[float]
    gradients: list[Tensors]
    critic_losses: list[float]
    critic_gradients: list[Tensors]
    metrics: dict[str, float]
    sizes: list[float] = field(default_factory=list)
    critic_sizes: list[float] = field(default_factory=list)


def expected_update(
    config: LearnerConfig,
    folder: Path,
    rows: Sequence[MicroBatch],
    steps: Sequence[OptimizerStep],
    critic_steps: Sequence[OptimizerStep] = (),
) -> Expected:
    """The update from `steps[0].before`; step k's gradient is computed at `steps[k].before`."""
    algorithm, lines = config.algorithm, read_lines(rows)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).double().eval()
    with torch.no_grad():
        if algorithm.kl_coefficient:
            for line in lines:
                line.reference = logprobs(model, line)
        put(model, steps[0].before)
        for line in lines:
            line.proximal = logprobs(model, line)
            if (algorithm.name == "cispo" and algorithm.proximal is None) or algorithm.proximal == "behaviour":
                line.proximal = line.behaviour
        if critic_steps:
            critic = build_critic(folder, critic_steps[0].before)
            for line in lines:
                line.values = values(critic, line)
    set_advantages(lines, algorithm)
    result = Expected([], [], [], [], {})
    seen: list[Seen] = []
    for batch, step in zip(mini_batches(lines, config), steps, strict=True):
        put(model, step.before)
        model.zero_grad()
        total, size = torch.zeros((), dtype=F64), 0.0
        for line in batch:
            every = distributions(model, line)
            current = chosen(every, line)
            losses = policy_losses(line, current, algorithm)
            if line.reference is not None and algorithm.kl_in == "loss":
                losses = losses + algorithm.kl_coefficient * kl(current, line.reference, algorithm.kl_kind)
            total = total + aggregate(losses, batch, algorithm)
            size += float(aggregate(losses.detach().abs(), batch, algorithm))
            seen.append(Seen(line, current.detach(), -(every.exp() * every).sum(-1).detach()))
        total.backward()
        result.losses.append(total.item())
        result.sizes.append(size)
        result.gradients.append(gradients(model))
    for batch, step in zip(mini_batches(lines, config), critic_steps, strict=False):
        put(critic, step.before)
        critic.zero_grad()
        tokens = sum(len(line) for line in batch)
        each = [value_losses(values(critic, line), line, config.critic.value_clip).sum() for line in batch]
        total = torch.stack(each).sum() / tokens
        total.backward()
        result.critic_losses.append(total.item())
        result.critic_sizes.append(total.item())  # every term is positive
        result.critic_gradients.append(gradients(critic))
    result.metrics = metrics(seen, lines, config)
    return result


def read_lines(rows: Sequence[MicroBatch]) -> list[Line]:
    """The sequences of a batch's records, in the order of their index."""
    found = []
    for row in sorted(rows, key=lambda each: each.index):
        start = 0
        ids, mask, behaviour = (getattr(row, name).to_pylist() for name in ("token_ids", "loss_mask", "logprobs"))
        for number, length in enumerate(row.lengths.to_pylist()):
            part = slice(start, start + length)
            start += length
            trained = torch.tensor(mask[part])
            found.append(
                Line(
                    ids=torch.tensor(ids[part]),
                    mask=trained,
                    temperature=row.temperatures[number].as_py(),
                    reward=row.rewards[number].as_py(),
                    group=row.trajectory_ids[number].split(".")[0],
                    behaviour=torch.tensor(behaviour[part], dtype=F64)[trained],
                )
            )
    return found


def distributions(model: nn.Module, line: Line) -> Tensor:
    """log π of every token of the vocabulary where a trained token was sampled, at its sampling temperature."""
    logits = model(input_ids=line.ids[None]).logits[0, :-1] / line.temperature
    return logits.log_softmax(-1)[line.mask[1:]]


def chosen(every: Tensor, line: Line) -> Tensor:
    """log π of the trained tokens, from their `distributions`."""
    return every.gather(1, line.ids[1:, None][line.mask[1:]])[:, 0]


def logprobs(model: nn.Module, line: Line) -> Tensor:
    """log π of the trained tokens."""
    return chosen(distributions(model, line), line)


def mini_batches(lines: Sequence[Line], config: LearnerConfig) -> list[list[Line]]:
    """The sequences of each optimizer step: groups by first occurrence, split evenly, in every epoch."""
    order = list(dict.fromkeys(line.group for line in lines))
    count = config.mini_batches or STEPS.get(config.algorithm.name, 1)
    parts = [[line for line in lines if order.index(line.group) * count // len(order) == k] for k in range(count)]
    return [part for part in parts if part] * (config.epochs or 1)


def set_advantages(lines: Sequence[Line], config: AlgorithmConfig) -> None:
    name, gamma = config.name, config.discount
    tokens = []  # rewards of each line's tokens
    for line in lines:
        earned = torch.zeros(len(line), dtype=F64)
        if len(line):
            earned[-1] = line.reward
        if line.reference is not None and config.kl_in == "reward":
            earned = earned - config.kl_coefficient * kl(line.proximal, line.reference, config.kl_kind)
        tokens.append(earned)
    whole = [float(each.sum()) if len(each) else line.reward for line, each in zip(lines, tokens, strict=True)]
    for line, earned, own in zip(lines, tokens, whole, strict=True):
        group = torch.tensor([r for other, r in zip(lines, whole, strict=True) if other.group == line.group], dtype=F64)
        centred = own - float(group.mean())
        if name in GROUP:
            std = float(group.std()) if len(group) > 1 else 0.0
            line.advantages = torch.full((len(line),), centred / (std + config.std_epsilon), dtype=F64)
        elif name == "dr_grpo":
            line.advantages = torch.full((len(line),), centred, dtype=F64)
        elif name == "rloo":
            others = (float(group.sum()) - own) / (len(group) - 1) if len(group) > 1 else own
            line.advantages = torch.full((len(line),), own - others, dtype=F64)
        elif name == "ppo":
            line.advantages = gae(earned, line.values, gamma, config.gae_lambda)
            line.returns = line.advantages + line.values
        else:
            if name == "reinforce_plus_plus_baseline":
                earned = torch.zeros_like(earned)
                earned[len(earned) - 1 :] = centred
            discounted = [
                sum(gamma ** (s - t) * float(earned[s]) for s in range(t, len(line))) for t in range(len(line))
            ]
            line.advantages = torch.tensor(discounted, dtype=F64)
    if name == "ppo" or name.startswith("reinforce"):
        everything = torch.cat([line.advantages for line in lines])
        for line in lines:
            line.advantages = (line.advantages - everything.mean()) / (everything.var() + 1e-8) ** 0.5


def gae(rewards: Tensor, seen: Tensor, gamma: float, lam: float) -> Tensor:
    """Σ_k (γλ)^k δ_{t+k}, summed term by term."""
    deltas = [
        float(rewards[t]) + gamma * (float(seen[t + 1]) if t + 1 < len(seen) else 0.0) - float(seen[t])
        for t in range(len(seen))
    ]
    sums = [sum((gamma * lam) ** k * deltas[t + k] for k in range(len(deltas) - t)) for t in range(len(deltas))]
    return torch.tensor(sums, dtype=F64)


def policy_losses(line: Line, current: Tensor, config: AlgorithmConfig) -> Tensor:
    """The loss of each token, including its off-policy weight."""
    name, a = config.name, line.advantages
    low, high = CLIPS.get(name, (0.2, 0.2))
    low = low if config.clip_low is None else config.clip_low
    high = high if config.clip_high is None else config.clip_high
    log_ratio = current - line.proximal
    if name == "cispo":
        return -correction(line, config) * log_ratio.detach().exp().clamp(1 - low, 1 + high) * a * current
    ratio = log_ratio.exp()
    if name == "gspo":
        ratio = log_ratio.detach().mean().exp() * (current - current.detach()).exp()
    losses = torch.maximum(-ratio * a, -ratio.clamp(1 - low, 1 + high) * a)
    if config.dual_clip is not None:
        losses = torch.where(a < 0, torch.minimum(losses, -config.dual_clip * a), losses)
    return correction(line, config) * losses


def correction(line: Line, config: AlgorithmConfig) -> Tensor:
    """w' of each token."""
    kind = config.correction or {"cispo": "none", "icepop": "mask"}.get(config.name, "truncate")
    if kind == "none":
        return torch.ones(len(line), dtype=F64)
    low = config.correction_low if config.correction_low is not None else 0.5 if config.name == "icepop" else 0.0
    cap = config.correction_cap or CAPS.get(config.name, 2.0)
    log_w = line.proximal - line.behaviour
    w = log_w.sum().exp().expand(len(line)) if config.correction_level == "sequence" else log_w.exp()
    if kind == "truncate":
        return w.clamp(low, cap)
    return torch.where((w < low) | (w > cap), 0.0, w)


def kl(current: Tensor, reference: Tensor, kind: str) -> Tensor:
    """k1, k2 or k3 of J. Schulman's note."""
    d = current - reference
    return {"k1": d, "k2": d**2 / 2, "k3": ((-d).exp() - 1 + d).clamp(max=10)}[kind]


def aggregate(losses: Tensor, batch: Sequence[Line], config: AlgorithmConfig) -> Tensor:
    """The contribution of one sequence's token losses to the loss of `batch`."""
    how = config.aggregation
    if how is None:
        how = {"dr_grpo": "constant_length", "rloo": "sequence_sum"}.get(config.name, "token_mean")
        how = "sequence_mean" if config.name in SEQUENCE_MEAN else how
    if how == "token_mean":
        return losses.sum() / sum(len(line) for line in batch)
    if how == "sequence_sum":
        return losses.sum() / len(batch)
    if how == "sequence_mean":
        return losses.sum() / max(len(losses), 1) / len(batch)
    assert config.max_response_tokens is not None
    return losses.sum() / config.max_response_tokens / len(batch)


def build_critic(folder: Path, weights: Tensors) -> nn.Module:
    """The policy's trunk and a linear value head."""
    trunk = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).base_model
    critic = nn.ModuleDict({"policy": trunk, "value": nn.Linear(trunk.config.hidden_size, 1)}).double().eval()
    put(critic, weights)
    return critic


def values(critic: nn.Module, line: Line) -> Tensor:
    """V of the context before each trained token."""
    hidden = critic["policy"](input_ids=line.ids[None]).last_hidden_state[0, :-1]  # type: ignore[index]
    return critic["value"](hidden)[:, 0][line.mask[1:]]  # type: ignore[index, no-any-return]


def value_losses(found: Tensor, line: Line, clip: float) -> Tensor:
    limited = torch.minimum(torch.maximum(found, line.values - clip), line.values + clip)
    return torch.maximum((found - line.returns) ** 2, (limited - line.returns) ** 2) / 2


def clipped(line: Line, current: Tensor, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Whether the clip changes a token's gradient, from below and from above: by gradients with and without it."""
    free = replace(config, clip_low=1.0, clip_high=1e9, dual_clip=None, correction="none")
    slopes = []
    for each in (replace(config, correction="none"), free):
        given = current.clone().requires_grad_()
        slopes.append(torch.autograd.grad(policy_losses(line, given, each).sum(), given)[0])
    log_ratio = current - line.proximal
    log_ratio = log_ratio.mean().expand(len(line)) if config.name == "gspo" else log_ratio
    changed = ~torch.isclose(*slopes, rtol=1e-12, atol=0)
    return changed & (log_ratio < 0), changed & (log_ratio > 0)


def metrics(seen: Sequence[Seen], lines: Sequence[Line], learner: LearnerConfig) -> dict[str, float]:
    """Means over the tokens with a forward pass: those of sequences with an advantage, or all with a KL in the loss."""
    config = learner.algorithm
    in_loss = bool(config.kl_coefficient) and config.kl_in == "loss"
    counted = [each for each in seen if len(each.line) and (in_loss or bool((each.line.advantages != 0).any()))]
    if not counted:
        return {}
    used = [(each.line, each.current) for each in counted]
    ratio = torch.cat([(now - line.behaviour).exp() for line, now in used])
    found = {
        "importance_ratio/mean": ratio.mean(),
        "importance_ratio/max": ratio.max(),
        "ess": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
        "kl/mismatch": (ratio - ratio.log() - 1).mean(),
        "correction/weight_mean": torch.cat([correction(line, config) for line, _ in used]).mean(),
        "entropy": torch.cat([each.entropies for each in counted]).mean(),
        "advantage/abs_mean": torch.cat([line.advantages for line in lines]).abs().mean(),
    }
    steps = (learner.mini_batches or STEPS.get(config.name, 1)) * (learner.epochs or 1)
    fixed = (config.proximal or ("behaviour" if config.name == "cispo" else "")) != "behaviour" and steps == 1
    unclipped = config.name == "rloo" and config.clip_low is config.clip_high is config.dual_clip is None
    if not fixed and not unclipped:
        sides = zip(*(clipped(line, now, config) for line, now in used), strict=True)
        found["clip_ratio/low"], found["clip_ratio/high"] = (torch.cat(side).double().mean() for side in sides)
    if in_loss:
        parts = [kl(now, line.reference, config.kl_kind) for line, now in used if line.reference is not None]
        found["kl/ref"] = torch.cat(parts).mean()
    elif config.kl_coefficient:
        parts = [kl(line.proximal, line.reference, config.kl_kind) for line in lines if line.reference is not None]
        found["kl/ref"] = torch.cat(parts).mean()
    return {name: float(value) for name, value in found.items()}


@torch.no_grad()
def put(model: nn.Module, weights: Tensors) -> None:
    """Set the parameters of `model`, by name."""
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


def gradients(model: nn.Module) -> Tensors:
    """A copy of each parameter's gradient."""
    return {n: (torch.zeros_like(p) if p.grad is None else p.grad.clone()) for n, p in model.named_parameters()}


def expected_adamw(config: LearnerConfig, steps: Sequence[OptimizerStep]) -> list[Tensors]:
    """Weights after each of `steps` of a new optimizer, by AdamW's formula (arXiv 1711.05101)."""
    first: Tensors = {}
    second: Tensors = {}
    after = []
    for count, step in enumerate(steps, 1):
        norm = torch.cat([g.flatten() for g in step.gradient.values()]).double().norm()
        shrink = min(1.0, config.max_gradient_norm / (float(norm) + 1e-6))
        found = {}
        for name, weight in step.before.items():
            g = step.gradient[name].double() * shrink
            b1, b2 = config.betas
            first[name] = b1 * first.get(name, torch.zeros_like(g)) + (1 - b1) * g
            second[name] = b2 * second.get(name, torch.zeros_like(g)) + (1 - b2) * g * g
            update = first[name] / (1 - b1**count) / ((second[name] / (1 - b2**count)) ** 0.5 + config.epsilon)
            decay = config.weight_decay if weight.ndim > 1 else 0.0
            found[name] = weight.double() - step.rate * (update + decay * weight.double())
        after.append(found)
    return after
