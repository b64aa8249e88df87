"""What the trainer can be told. Free of torch, so that a command line can read it at once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Literal, get_args

AlgorithmName = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gspo",
    "cispo",
    "decoupled_ppo",
    "tis",
    "icepop",
    "ppo",
]
AggregationName = Literal["token_mean", "sequence_mean", "constant_length"]
Proximal = Literal["behaviour", "update_start"]
CorrectionKind = Literal["none", "truncate", "mask"]
CorrectionLevel = Literal["token", "sequence"]
KlKind = Literal["k1", "k2", "k3"]
KlPlace = Literal["loss", "reward"]
Schedule = Literal["constant", "linear", "cosine"]
Precision = Literal["float32", "bfloat16"]


def _choose(name: str, value: object, choices: Iterable[object]) -> None:
    if value not in (known := list(choices)):
        raise ValueError(f"{name} must be one of {', '.join(map(str, known))}, not {value!r}")


def _within(name: str, value: float | None, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    """Raise ValueError unless `value` is None or finite and in [low, high], or (low, high] with `open_low`."""
    if value is None:
        return
    if not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
        raise ValueError(f"{name} must be a number in {'(' if open_low else '['}{low}, {high}], not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """An algorithm by name, and what to change of it; None leaves what `operators/trainer/algorithms.py` says.

    Raises ValueError naming the field that does not fit.
    """

    name: AlgorithmName = "grpo"
    aggregation: AggregationName | None = None  # how token losses become one number
    clip_low: float | None = None  # ε_l: the importance ratio is clipped below at 1 − ε_l
    clip_high: float | None = None  # ε_h: and above at 1 + ε_h
    dual_clip: float | None = None  # c > 1: bounds the loss of a token of negative advantage by c·|A|
    proximal: Proximal | None = None  # the policy that ratios are taken against
    correction: CorrectionKind | None = None  # what becomes of the weight π_o/μ beyond its bounds
    correction_level: CorrectionLevel | None = None  # a weight a token, or their product a sequence
    correction_low: float | None = None  # lower bound of that weight
    correction_cap: float | None = None  # upper bound of that weight
    std_epsilon: float = 1e-6  # added to a group's standard deviation
    discount: float = 1.0  # γ per token, of reinforce_plus_plus and ppo
    gae_lambda: float = 1.0  # λ of ppo's advantages: 1 takes the whole return, 0 the next value alone
    max_response_tokens: int | None = None  # L_max of the constant_length aggregation
    kl_coefficient: float = 0.0  # β of the penalty towards the initial model; 0 keeps no reference model
    kl_kind: KlKind = "k3"  # its estimator
    kl_in: KlPlace = "loss"  # added to each token's loss, or taken from each token's reward

    def __post_init__(self) -> None:
        _choose("name", self.name, get_args(AlgorithmName))
        for name, choices in (
            ("aggregation", AggregationName),
            ("proximal", Proximal),
            ("correction", CorrectionKind),
            ("correction_level", CorrectionLevel),
            ("kl_kind", KlKind),
            ("kl_in", KlPlace),
        ):
            if getattr(self, name) is not None:
                _choose(name, getattr(self, name), get_args(choices))
        _within("clip_low", self.clip_low, 0, 1)
        _within("clip_high", self.clip_high, 0)
        _within("dual_clip", self.dual_clip, 1, open_low=True)
        _within("correction_low", self.correction_low, 0)
        _within("correction_cap", self.correction_cap, 0, open_low=True)
        _within("std_epsilon", self.std_epsilon, 0)
        _within("discount", self.discount, 0, 1, open_low=True)
        _within("gae_lambda", self.gae_lambda, 0, 1)
        _within("max_response_tokens", self.max_response_tokens, 1)
        _within("kl_coefficient", self.kl_coefficient, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    """The second model of ppo: the policy's own trunk, as it was at first, and a value for each token.

    Raises ValueError naming the field that does not fit.
    """

    learning_rate: float = 1e-3  # its peak; warm-up and schedule are those of the policy
    value_clip: float = 0.5  # ε_v: a value that moved further than this in one batch has no gradient
    warmup_batches: int = 0  # batches of which the critic alone learns

    def __post_init__(self) -> None:
        _within("critic.learning_rate", self.learning_rate, 0, open_low=True)
        _within("critic.value_clip", self.value_clip, 0, open_low=True)
        _within("critic.warmup_batches", self.warmup_batches, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """What AdamW does otherwise with parameters in whose name the regular expression `match` is found.

    Raises ValueError naming the field that does not fit.
    """

    match: str
    weight_decay: float | None = None  # None: the learner's for matrices, 0 for vectors
    learning_rate_factor: float = 1.0

    def __post_init__(self) -> None:
        try:
            re.compile(self.match)
        except re.error as error:
            raise ValueError(f"match must be a regular expression, not {self.match!r}: {error}") from error
        _within("weight_decay", self.weight_decay, 0)
        _within("learning_rate_factor", self.learning_rate_factor, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters in place of the policy's own weights; a critic, where there is one, is trained whole.

    Raises ValueError naming the field that does not fit, or what is not installed.
    """

    rank: int = 0  # r, the adapters' inner width; 0 trains all weights
    alpha: float = 32.0  # α: an adapter's product counts α/r times
    targets: tuple[str, ...] = ()  # last parts of the names of the layers that get one; empty: all but the output's
    seed: int = 0  # of the random half of each adapter

    def __post_init__(self) -> None:
        _within("lora.rank", self.rank, 0)
        _within("lora.alpha", self.alpha, 0, open_low=True)
        if self.rank and find_spec("peft") is None:
            raise ValueError("lora.rank needs peft, which is not installed: pip install 'laminar-rl[lora]'")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """How a global batch changes the weights: AdamW on gradients accumulated over micro-batches, one step a mini-batch.

    Raises ValueError naming the field that does not fit.
    """

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    learning_rate: float = 2e-4
    warmup_steps: int = 5  # batches over which the learning rate rises linearly from 0
    schedule: Schedule = "constant"  # after the warm-up
    total_steps: int | None = None  # batches at which a linear or cosine schedule ends
    final_learning_rate: float = 0.0  # where it ends
    betas: tuple[float, float] = (0.9, 0.95)  # decay of AdamW's first and second moment
    epsilon: float = 1e-8  # of AdamW
    weight_decay: float = 0.0  # decoupled, of matrices only
    parameter_groups: tuple[ParameterGroup, ...] = ()  # exceptions; the first that matches a parameter's name counts
    max_gradient_norm: float = 1.0  # the whole gradient is scaled down to this 2-norm
    max_skipped_batches: int = 5  # batches in a row with a gradient that is not finite, after which the trainer fails
    mismatch_bound: float = 0.01  # nats a token between rollout and trainer at staleness 0, above which it is logged
    mini_batches: int = 1  # optimizer steps a pass over the batch: groups are dealt out to them evenly, in their order
    epochs: int = 1  # passes over the batch
    precision: Precision = "float32"  # of activations; weights and optimizer are always float32
    gradient_checkpointing: bool = False  # make each layer's activations again in the backward pass: memory for time
    share_device: bool = False  # actor, critic and reference lie on the device in turns, else all at once
    micro_batch_tokens: int = (
        1024  # tokens (prompts included) of one forward and backward pass; a longer sequence goes alone
    )
    logits_chunk_tokens: int = (
        4096  # response tokens whose logits exist at once; beyond it they are made again in the backward pass
    )

    def __post_init__(self) -> None:
        _within("learning_rate", self.learning_rate, 0)
        _within("final_learning_rate", self.final_learning_rate, 0, self.learning_rate)
        _within("warmup_steps", self.warmup_steps, 0)
        _choose("schedule", self.schedule, get_args(Schedule))
        if self.schedule != "constant" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            kind = f"{self.schedule} schedule"
            raise ValueError(f"total_steps must exceed warmup_steps with a {kind}, not be {self.total_steps}")
        _choose("precision", self.precision, get_args(Precision))
        _within("mini_batches", self.mini_batches, 1)
        _within("epochs", self.epochs, 1)
        for beta in self.betas:
            _within("betas", beta, 0, 1 - 1e-9)
        _within("epsilon", self.epsilon, 0, open_low=True)
        _within("weight_decay", self.weight_decay, 0)
        _within("max_gradient_norm", self.max_gradient_norm, 0, open_low=True)
        _within("mismatch_bound", self.mismatch_bound, 0, open_low=True)
        _within("max_skipped_batches", self.max_skipped_batches, 1)
        _within("micro_batch_tokens", self.micro_batch_tokens, 1)
        _within("logits_chunk_tokens", self.logits_chunk_tokens, 1)
