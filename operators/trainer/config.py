"""The learner's configuration. It does not import torch, so that the command line starts fast."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from infra.setting_types import (
    FINITE,
    CheckedSettings,
    FiniteNonNegative,
    FinitePositive,
    NonNegativeInt,
    PositiveInt,
    PositiveShare,
    Share,
)

BUILT_IN_LEARNER = "fsdp2"
"""The value of `LearnerConfig.name` for the learner in learner.py."""
WITHOUT_GROUPS = frozenset({"ppo", "reinforce_plus_plus"})
"""Algorithms whose advantage does not compare the samples of a prompt."""
WITH_CRITIC = frozenset({"ppo"})
"""Algorithms that train a second model, the critic."""
WITH_DISCOUNT = frozenset({"ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"})
"""Algorithms that discount the rewards of later tokens."""
AlgorithmName = Literal[
    "tis",
    "grpo",
    "dr_grpo",
    "dapo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gspo",
    "cispo",
    "decoupled_ppo",
    "icepop",
    "ppo",
]
AggregationName = Literal["token_mean", "sequence_mean", "sequence_sum", "constant_length"]
Proximal = Literal["behaviour", "update_start"]
CorrectionKind = Literal["none", "truncate", "mask"]
CorrectionLevel = Literal["token", "sequence"]
KlKind = Literal["k1", "k2", "k3"]
KlPlace = Literal["loss", "reward"]
RateSchedule = Literal["constant", "linear", "cosine"]
Precision = Literal["float32", "bfloat16"]
Offloaded = Literal["moments", "reference"]
_Decay = Annotated[float, Ge(0), Lt(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig(CheckedSettings):
    """An algorithm by name, and overrides; an unset key keeps the algorithm's own value (docs/training.md).

    Raises ValueError naming the invalid field.
    """

    name: AlgorithmName = "tis"
    """Selects advantage, loss, aggregation, clip, correction and the optimizer steps per batch of its paper
    (docs/training.md); the keys below override them."""
    aggregation: AggregationName | None = None
    """How token losses are combined into one number."""
    clip_low: Share | None = None
    """ε_l: the importance ratio is clipped below at 1 − ε_l. A clip has no effect with one optimizer step per batch and
    ratios against the policy at the start of the update: every ratio is then 1."""
    clip_high: FiniteNonNegative | None = None
    """ε_h: the importance ratio is clipped above at 1 + ε_h."""
    dual_clip: Annotated[float, Gt(1), FINITE] | None = None
    """c > 1: bounds the loss of a token of negative advantage by c·|A|."""
    proximal: Proximal | None = None
    """The policy against which importance ratios are taken: at the start of the update, or the rollout's."""
    correction: CorrectionKind | None = None
    """The off-policy weight π_o/μ: not used, limited to its bounds, or 0 outside them."""
    correction_level: CorrectionLevel | None = None
    """Whether π_o/μ is taken per token, or as the product over a sequence."""
    correction_low: FiniteNonNegative | None = None
    """Lower bound of π_o/μ."""
    correction_cap: FinitePositive | None = None
    """Upper bound of π_o/μ."""
    std_epsilon: FiniteNonNegative = 1e-6
    """Added to a group's standard deviation."""
    discount: PositiveShare = 1.0
    """γ per token, for reinforce_plus_plus, reinforce_plus_plus_baseline and ppo."""
    gae_lambda: Share = 1.0
    """λ of GAE, for ppo: 1 uses the whole return, 0 only the next value."""
    max_response_tokens: PositiveInt | None = None
    """L_max of the constant_length aggregation."""
    kl_coefficient: FiniteNonNegative = 0.0
    """β of the KL penalty to the initial model; 0: no reference model is loaded."""
    kl_kind: KlKind = "k3"
    """The KL estimator."""
    kl_in: KlPlace = "loss"
    """Where the KL penalty applies: added to each token's loss, or subtracted from each token's reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig(CheckedSettings):
    """The critic of ppo: a second model with the policy's initial trunk and a value output per token.

    Raises ValueError naming the invalid field.
    """

    learning_rate: FinitePositive = 1e-5
    """Peak of the critic's learning rate; warm-up and schedule are the policy's."""
    value_clip: FinitePositive = 0.5
    """ε_v: a value that changes by more than this within a batch has no gradient."""
    warmup_batches: NonNegativeInt = 0
    """Number of first batches that train the critic alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup(CheckedSettings):
    """AdamW settings for parameters whose name contains a match of the regular expression `match`.

    Raises ValueError naming the invalid field.
    """

    match: str
    """A regular expression, searched in the parameter's name."""
    weight_decay: FiniteNonNegative | None = None
    """Weight decay of these parameters; unset: the learner's for matrices, 0 for vectors."""
    learning_rate_factor: FiniteNonNegative = 1.0
    """Multiplies the learning rate of these parameters."""

    def _check(self) -> None:
        try:
            re.compile(self.match)
        except re.error as error:
            raise ValueError(f"match must be a regular expression, not {self.match!r}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig(CheckedSettings):
    """Low-rank adapters, trained instead of the policy's own weights. All weights of a critic are trained.

    Raises ValueError naming the invalid field, or the package that is not installed.
    """

    rank: NonNegativeInt = 0
    """r, the adapters' rank; 0 trains all weights."""
    alpha: FinitePositive = 32.0
    """α: an adapter's product is scaled by α/r."""
    targets: tuple[str, ...] = ()
    """Names of the layers with adapters, such as q_proj; empty: all linear layers but the output. Not the embedding,
    nor an output layer that shares its weights."""
    seed: int = 0
    """Seed of the randomly initialised matrix of each adapter."""

    def _check(self) -> None:
        if self.rank and find_spec("peft") is None:
            raise ValueError("lora.rank needs peft, which is not installed: install the extra lora")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig(CheckedSettings):
    """How a global batch is trained: AdamW on gradients accumulated over micro-batches, a step per mini-batch.

    Raises ValueError naming the invalid field.
    """

    name: str = BUILT_IN_LEARNER
    """The learner: `fsdp2`, `module:Class` or `file.py:Class` (operators/trainer/learner_contract.py). A class of yours
    is given this section; the plan of memory is for `fsdp2` alone."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    learning_rate: FiniteNonNegative = 1e-6
    """Peak of the policy's learning rate: 1e-6 suits pretrained models of billions of parameters."""
    warmup_steps: NonNegativeInt = 10
    """The learning rate rises linearly from 0 over so many trained batches."""
    schedule: RateSchedule = "constant"
    """Learning-rate schedule after the warm-up."""
    total_steps: int | None = None
    """The number of trained batches after which a linear or cosine schedule ends. Lost batches and those that cannot be
    trained, which `trainer.optimizer_steps` counts, do not count, nor for the policy those of
    `critic.warmup_batches`."""
    final_learning_rate: FiniteNonNegative = 0.0
    """Learning rate at the end of a linear or cosine schedule."""
    betas: tuple[_Decay, _Decay] = (0.9, 0.95)
    """Decay of AdamW's first and second moment."""
    epsilon: FinitePositive = 1e-8
    """AdamW's ε."""
    weight_decay: FiniteNonNegative = 0.0
    """AdamW's decoupled weight decay, for matrices only."""
    parameter_groups: tuple[ParameterGroup, ...] = ()
    """Exceptions for some parameters; the first match of a parameter's name applies. Each must match one."""
    max_gradient_norm: FinitePositive = 1.0
    """The global gradient is clipped to this 2-norm."""
    max_skipped_batches: PositiveInt = 5
    """Consecutive batches with a non-finite loss or gradient after which the trainer fails."""
    mismatch_bound: FinitePositive = 0.01
    """KL between rollout and trainer under the same weights, in nats per token, above which a warning is logged."""
    mini_batches: PositiveInt | None = None
    """Optimizer steps per pass over the batch; groups are split evenly, in order. Unset: those of the algorithm."""
    epochs: PositiveInt | None = None
    """Passes over the batch. Unset: those of the algorithm."""
    precision: Precision = "float32"
    """Precision of activations; weights and optimizer are always float32."""
    deterministic: bool = True
    """Train on a GPU with deterministic kernels: the same batches give the same weights bit by bit on GPUs of one kind,
    as they do on a CPU. On an H200 this cost nothing that was measured."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    reference_dtype: Precision = "float32"
    """Precision of the weights of the KL penalty's reference."""
    keep_gathered: bool = False
    """With several ranks: keep layers gathered from their first use in an optimizer step until its end, so that further
    micro-batches gather nothing. Needs the memory of the whole model in `precision`, of actor and critic in turn."""
    offload: tuple[Offloaded, ...] = ()
    """What is in host memory while it is not used: the optimizer's moments outside of its steps, the reference's
    weights outside of its turn. Costs the transfer of 16 bytes a parameter in each optimizer step, and of the reference
    in each batch."""
    share_device: bool = False
    """Load actor, critic and reference on the device one at a time instead of all at once. With a single rank only."""
    micro_batch_tokens: PositiveInt = 1024
    """Tokens (prompts included) of one forward and backward pass; a longer sequence is alone in its pass."""
    logits_chunk_tokens: PositiveInt = 4096
    """Response tokens whose logits exist at once; with more, logits are recomputed in the backward pass."""

    def _check(self) -> None:
        module, _, member = self.name.rpartition(":")
        if self.name != BUILT_IN_LEARNER and not (module and member):
            raise ValueError(f"name must be {BUILT_IN_LEARNER!r}, 'module:Class' or 'file.py:Class', not {self.name!r}")
        if self.final_learning_rate > self.learning_rate:
            raise ValueError(
                f"final_learning_rate must be at most learning_rate ({self.learning_rate}), not "
                f"{self.final_learning_rate}"
            )
        if self.schedule != "constant" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            kind = f"{self.schedule} schedule"
            raise ValueError(
                f"total_steps must exceed warmup_steps ({self.warmup_steps}) with a {kind}, not be {self.total_steps}"
            )
