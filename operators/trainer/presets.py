"""What each algorithm sets: aggregation, clip, ratio, off-policy weight, optimizer steps per batch, and its source; the
schedule of the learning rate.

`docs/training.md` has the same table (a test compares them). The functions of an algorithm are in `algorithms.py`; this
module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from operators.trainer.config import (
    WITH_CRITIC,
    WITH_DISCOUNT,
    AggregationName,
    AlgorithmConfig,
    AlgorithmName,
    CorrectionKind,
    CorrectionLevel,
    LearnerConfig,
    Proximal,
)

_Record = TypeVar("_Record", "Clip", "Correction")


@dataclass(frozen=True, slots=True)
class Clip:
    """The trust region of an importance ratio: [1 − low, 1 + high], and the constant c of the dual clip."""

    low: float
    high: float
    dual: float | None = None


@dataclass(frozen=True, slots=True)
class Correction:
    """How w = π_o/μ is applied: not at all (none), limited to [low, cap] (truncate), or 0 outside [low, cap] (mask)."""

    kind: CorrectionKind = "none"
    cap: float = 2.0
    low: float = 0.0
    level: CorrectionLevel = "token"


SYMMETRIC = Clip(0.2, 0.2)
CLIP_HIGHER = Clip(0.2, 0.28)
UNCLIPPED = Clip(1.0, math.inf)
TRUNCATED = Correction("truncate", cap=2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The settings of an algorithm, their source, and the learning rate there, None if it names none.

    With `proximal` "update_start", π_o is the policy at the start of the update, and w = π_o/μ corrects for staleness
    (decoupled PPO, arXiv 2110.00641). With "behaviour", π_o = μ: ρ itself corrects for staleness, and w = 1.

    "update_start" is the default because batches are stale here. Ratios against μ are clipped where the policy has
    changed most since, so the tokens that decide an answer would have no gradient. On fresh batches both are the same.
    The papers' own batches are fresh but for those of `decoupled_ppo`: the weight w of the others is ours.
    """

    source: str
    aggregation: AggregationName = "token_mean"
    clip: Clip = SYMMETRIC
    proximal: Proximal = "update_start"
    correction: Correction = TRUNCATED
    clips_weight: bool = False
    """The clip limits a weight without gradient, so a dual clip has no effect."""
    mini_batches: int = 1
    paper_rate: float | None = None


PRESETS: dict[AlgorithmName, Preset] = {
    "tis": Preset(source="weights of at most 2 (arXiv 2505.24298, eq. 5, with C = 2); loss of DAPO", clip=CLIP_HIGHER),
    "grpo": Preset(
        source="arXiv 2402.03300, §4.1.2 and §4.2: one update after each exploration",
        aggregation="sequence_mean",
        paper_rate=1e-6,
    ),
    "dr_grpo": Preset(
        source="arXiv 2503.20783, §3.2; steps of its published command: 1024 answers by 128",
        aggregation="constant_length",
        mini_batches=8,
        paper_rate=1e-6,
    ),
    "dapo": Preset(
        source="arXiv 2503.14476, §3 and §4.1; its dynamic sampling is a sampler of the buffer",
        clip=CLIP_HIGHER,
        mini_batches=16,
        paper_rate=1e-6,
    ),
    "rloo": Preset(source="arXiv 2402.14740, §3.3: REINFORCE, no clip", aggregation="sequence_sum", clip=UNCLIPPED),
    "reinforce_plus_plus": Preset(
        source="arXiv 2501.03262, §3; steps and rate of OpenRLHF's script: 1024 answers by 128",
        mini_batches=8,
        paper_rate=5e-7,
    ),
    "reinforce_plus_plus_baseline": Preset(
        source="arXiv 2501.03262, §3; steps and rate of OpenRLHF's script: 1024 answers at once",
        paper_rate=5e-7,
    ),
    "ppo": Preset(
        source="arXiv 1707.06347, eq. 7; steps and rate of verl 0.9.1: 1024 prompts by 256",
        mini_batches=4,
        paper_rate=1e-6,
    ),
    "gspo": Preset(
        source="arXiv 2507.18071, §5.1",
        aggregation="sequence_mean",
        clip=Clip(3e-4, 4e-4),
        mini_batches=4,
    ),
    # The clipped weight is π/μ, which is the off-policy correction itself.
    "cispo": Preset(
        source="arXiv 2506.13585, eq. 4 and §3.1: no lower bound, 16 rounds of updates; its upper bound is not given",
        clip=Clip(1.0, 0.28),
        proximal="behaviour",
        correction=Correction("none"),
        clips_weight=True,
        mini_batches=16,
    ),
    "decoupled_ppo": Preset(
        source="arXiv 2505.24298, eq. 5 and appendix; weights are truncated at 5 here",
        correction=Correction("truncate", cap=5.0),
        mini_batches=4,
        paper_rate=2e-5,
    ),
    "icepop": Preset(
        source="arXiv 2510.18855: masked weights in [0.5, 5]",
        aggregation="sequence_mean",
        correction=Correction("mask", low=0.5, cap=5.0),
    ),
}


def resolve_preset(config: AlgorithmConfig) -> Preset:
    """The preset that `config` names, with its overrides."""
    known = PRESETS[config.name]
    return replace(
        known,
        aggregation=config.aggregation or known.aggregation,
        proximal=config.proximal or known.proximal,
        clip=_changed(known.clip, low=config.clip_low, high=config.clip_high, dual=config.dual_clip),
        correction=_changed(
            known.correction,
            kind=config.correction,
            level=config.correction_level,
            low=config.correction_low,
            cap=config.correction_cap,
        ),
    )


def learning_rate(update: int, config: LearnerConfig) -> float:
    """The learning rate of update `update`, counted from 0: linear warm-up over `warmup_steps`, then the schedule.

    The first update has learning_rate / warmup_steps; a linear or cosine schedule reaches `final_learning_rate` at
    `total_steps`.
    """
    if update < config.warmup_steps:
        return config.learning_rate * (update + 1) / config.warmup_steps
    if config.schedule == "constant" or config.total_steps is None:
        return config.learning_rate
    progress = min(1.0, (update - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    left = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.final_learning_rate + (config.learning_rate - config.final_learning_rate) * left


def optimizer_steps(config: LearnerConfig) -> tuple[int, int]:
    """Mini-batches and epochs of a batch: those of `config`, else the mini-batches of its algorithm, and one epoch."""
    preset = PRESETS[config.algorithm.name]
    return config.mini_batches or preset.mini_batches, config.epochs or 1


def clip_can_bind(config: LearnerConfig, groups: float = math.inf) -> bool:
    """Whether a ratio can differ from 1 and is clipped: ratios against μ, or several optimizer steps a batch, which has
    at most as many mini-batches as `groups`."""
    preset, (mini_batches, epochs) = resolve_preset(config.algorithm), optimizer_steps(config)
    return preset.clip != UNCLIPPED and (preset.proximal == "behaviour" or min(mini_batches, groups) * epochs > 1)


def algorithm_problem(config: AlgorithmConfig) -> str | None:
    """Why no batch can be trained with the settings of `config` together; None if it can."""
    preset = resolve_preset(config)
    weight = preset.correction
    if preset.aggregation == "constant_length" and config.max_response_tokens is None:
        return "algorithm.max_response_tokens must be set: the constant_length aggregation divides by it"
    if weight.kind != "none" and weight.low > weight.cap:
        return (
            f"algorithm.correction_low is {weight.low:g} and correction_cap {weight.cap:g}, with name = {config.name}: "
            "no weight is within them. Set correction_low to at most correction_cap"
        )
    return None


def unused_settings(config: LearnerConfig, ranks: int) -> Iterator[str]:
    """A warning for each setting that was chosen and has no effect in training by `ranks`."""
    algorithm, preset = config.algorithm, resolve_preset(config.algorithm)
    for names, reason in _unread_settings(config, ranks):
        if names:
            them = "it" if len(names) == 1 else "them"
            yield f"trainer.learner has settings without effect ({', '.join(names)}): {reason}. Remove {them}"
    if warning := unused_clip_warning(config):
        yield warning
    keys = ("correction", "correction_level", "correction_low", "correction_cap")
    chosen = [key for key in keys if getattr(algorithm, key) not in (None, "none")]
    low, cap = algorithm.correction_low, algorithm.correction_cap
    one_is_within = (low is None or low <= 1) and (cap is None or cap >= 1)
    if chosen and one_is_within and (preset.proximal == "behaviour" or preset.correction.kind == "none"):
        reason = 'proximal = "behaviour"' if preset.proximal == "behaviour" else 'correction = "none"'
        yield (
            f"trainer.learner.algorithm has an off-policy weight without effect ({', '.join(chosen)}): with {reason} "
            f"every weight is 1. Remove {'it' if len(chosen) == 1 else 'them'}"
        )
    if algorithm.kl_coefficient and (algorithm.kl_kind, algorithm.kl_in) == ("k1", "loss"):
        yield (
            'trainer.learner.algorithm.kl_kind = "k1" in the loss: its expected gradient is 0. Set kl_in = "reward", '
            'or kl_kind = "k2" or "k3"'
        )


def _unread_settings(config: LearnerConfig, ranks: int) -> Iterator[tuple[list[str], str]]:
    """Names of settings that differ from their defaults and that nothing reads, and why."""
    algorithm = config.algorithm
    if not config.lora.rank:
        yield _changed_names(config.lora, "lora."), "lora.rank is 0, which trains all weights"
    if config.schedule == "constant":
        yield _changed_names(config, "", "total_steps", "final_learning_rate"), 'schedule is "constant"'
    if algorithm.name not in WITH_CRITIC:
        of_critic = _changed_names(config.critic, "critic.") + _changed_names(algorithm, "algorithm.", "gae_lambda")
        yield of_critic, f"{algorithm.name} has no critic"
    if algorithm.name not in WITH_DISCOUNT:
        yield _changed_names(algorithm, "algorithm.", "discount"), f"{algorithm.name} discounts no rewards"
    if (aggregation := resolve_preset(algorithm).aggregation) != "constant_length":
        yield _changed_names(algorithm, "algorithm.", "max_response_tokens"), f'the aggregation is "{aggregation}"'
    if not algorithm.kl_coefficient:
        names = _changed_names(algorithm, "algorithm.", "kl_kind", "kl_in") + _changed_names(
            config, "", "reference_dtype"
        )
        names += ["offload of the reference"] if "reference" in config.offload else []
        yield names, "algorithm.kl_coefficient is 0, so there is no reference"
    if ranks == 1:
        yield _changed_names(config, "", "keep_gathered"), "a single rank gathers nothing"


def _changed_names(section: Any, prefix: str, *names: str) -> list[str]:
    """Which of `names` in `section`, by default of all, differ from their defaults; with `prefix`."""
    default = type(section)()
    every = names or tuple(each.name for each in fields(section))
    return [prefix + name for name in every if getattr(section, name) != getattr(default, name)]


def unused_clip_warning(config: LearnerConfig) -> str | None:
    """A warning if a clip was chosen that can never act.

    It was chosen by a key, or with an algorithm whose paper takes several steps per batch, which a key reduced to one.
    """
    algorithm, preset = config.algorithm, PRESETS[config.algorithm.name]
    if preset.clips_weight and algorithm.dual_clip is not None:
        return (
            f"trainer.learner.algorithm.dual_clip has no effect with name = {algorithm.name}, whose clip limits a "
            "weight that has no gradient. Remove dual_clip, or set clip_high"
        )
    chosen = [key for key in ("clip_low", "clip_high", "dual_clip") if getattr(algorithm, key) is not None]
    if preset.mini_batches > 1:
        chosen.append(f"name = {algorithm.name}, which takes {preset.mini_batches} steps per batch")
    if not chosen or clip_can_bind(config):
        return None
    return (
        f"trainer.learner.algorithm has a clip without effect ({', '.join(chosen)}): with one optimizer step per "
        "batch and ratios against the policy at the start of the update, every ratio is 1. Set "
        'trainer.learner.mini_batches or epochs above 1, or algorithm.proximal = "behaviour"'
    )


def _changed(record: _Record, **changes: Any) -> _Record:
    return replace(record, **{name: value for name, value in changes.items() if value is not None})
