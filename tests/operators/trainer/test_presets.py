"""Presets mean what their papers mean, the documentation says so, and a clip that cannot act is reported."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from optimizer_steps import record_steps
from trainer_batches import make_batch, save_tiny_model

from operators.trainer.algorithms import resolve
from operators.trainer.config import AlgorithmConfig, AlgorithmName, CriticConfig, LearnerConfig, LoraConfig
from operators.trainer.learner import Learner
from operators.trainer.presets import (
    PRESETS,
    UNCLIPPED,
    Correction,
    algorithm_problem,
    clip_can_bind,
    optimizer_steps,
    resolve_preset,
    unused_clip_warning,
    unused_settings,
)
from pipelines.present.topic_table import markdown

CRITIC = {"critic": CriticConfig(value_clip=0.2)}
REFERENCE: dict[str, Any] = {"reference_dtype": "bfloat16", "offload": ("moments", "reference")}
TRAINING = Path(__file__).parents[3] / "docs" / "training.md"


def named(name: AlgorithmName, **changes: object) -> LearnerConfig:
    return LearnerConfig(algorithm=AlgorithmConfig(name=name, max_response_tokens=20), **changes)  # type: ignore[arg-type]


def preset_table() -> str:
    """The presets as a Markdown table."""
    head = ("name", "aggregation", "clip", "ratio against", "weight π_o/μ", "steps per batch", "paper's rate", "source")
    rows = []
    for name, preset in PRESETS.items():
        clip, weight = preset.clip, preset.correction
        bounds = (
            f"at most {weight.cap:g}" if weight.kind == "truncate" else f"0 outside [{weight.low:g}, {weight.cap:g}]"
        )
        rows.append(
            (
                f"`{name}`",
                preset.aggregation.replace("_", " "),
                "none" if clip == UNCLIPPED else f"{'–' if clip.low == 1 else f'{clip.low:g}'} / {clip.high:g}",
                "μ" if preset.proximal == "behaviour" else "π_o",
                "none: ρ is against μ" if weight.kind == "none" else bounds,
                str(preset.mini_batches),
                "–" if preset.paper_rate is None else f"{preset.paper_rate:g}",
                preset.source,
            )
        )
    return markdown(head, rows)


def test_documentation_has_the_presets() -> None:
    assert preset_table() in TRAINING.read_text("utf-8"), preset_table()


def test_defaults_are_those_of_a_pretrained_model() -> None:
    config = LearnerConfig()
    preset = PRESETS[config.algorithm.name]
    assert (preset.aggregation, preset.correction.kind, preset.correction.cap) == ("token_mean", "truncate", 2.0)
    assert (config.learning_rate, config.warmup_steps, config.critic.learning_rate) == (1e-6, 10, 1e-5)
    assert optimizer_steps(config) == (1, 1)


def test_weight_of_a_preset_without_one_has_the_default_cap() -> None:
    algorithm = AlgorithmConfig(name="cispo", correction="truncate")
    assert resolve_preset(algorithm).correction == Correction("truncate", cap=2.0)


def test_steps_of_the_configuration_override_those_of_the_preset() -> None:
    assert optimizer_steps(named("gspo")) == (4, 1)
    assert optimizer_steps(named("gspo", mini_batches=1, epochs=3)) == (1, 3)


@pytest.mark.parametrize(("one", "other"), [("gspo", "grpo"), ("dapo", "tis"), ("decoupled_ppo", "dapo")])
def test_presets_differ_by_their_papers_clips_and_steps(
    tmp_path: Path, one: AlgorithmName, other: AlgorithmName
) -> None:
    """With one step a batch each pair would take the same update."""
    folder = save_tiny_model(tmp_path)
    batch = make_batch(groups=16, samples=2)
    taken = []
    for name in (one, other):
        learner = Learner(named(name, learning_rate=1e-3, warmup_steps=0), folder)
        steps = record_steps(learner._actor)
        metrics = learner.update(batch)
        assert len(steps) == PRESETS[name].mini_batches
        assert ("clip_ratio/high" in metrics) is (len(steps) > 1)
        taken.append(metrics["loss"])
    assert taken[0] != taken[1]


@pytest.mark.parametrize(
    ("config", "warned"),
    [
        (LearnerConfig(), False),
        (named("grpo"), False),
        (named("gspo"), False),
        (named("gspo", mini_batches=1), True),
        (named("gspo", mini_batches=1, epochs=2), False),
        (named("dapo", mini_batches=1), True),
        (named("cispo", mini_batches=1), False),
        (LearnerConfig(algorithm=AlgorithmConfig(name="cispo", dual_clip=3.0)), True),
        (LearnerConfig(algorithm=AlgorithmConfig(name="dapo", dual_clip=3.0)), False),
        (LearnerConfig(algorithm=AlgorithmConfig(clip_low=0.1, proximal="behaviour")), False),
        (LearnerConfig(algorithm=AlgorithmConfig(dual_clip=3.0)), True),
        (LearnerConfig(algorithm=AlgorithmConfig(name="rloo", clip_high=0.2)), True),
    ],
)
def test_clip_that_cannot_act_is_warned_of_where_it_was_chosen(config: LearnerConfig, warned: bool) -> None:
    assert (unused_clip_warning(config) is not None) is warned


@pytest.mark.parametrize(
    ("config", "warning"),
    [
        ({"name": "tis", "correction_cap": 3.0}, None),
        ({"name": "tis", "proximal": "behaviour", "correction": "none"}, None),
        ({"name": "tis", "proximal": "behaviour", "correction_cap": 3.0}, "weight without effect (correction_cap)"),
        ({"name": "cispo", "correction": "mask", "correction_low": 0.1}, "effect (correction, correction_low)"),
        ({"name": "tis", "correction": "none", "correction_cap": 3.0}, 'with correction = "none" every weight is 1'),
        ({"name": "cispo", "correction_low": 1.0, "correction_cap": 1.0}, "every weight is 1. Remove them"),
        ({"name": "cispo", "correction_low": 1.5, "correction_cap": 2.0}, None),
        ({"name": "cispo", "correction_low": 0.5, "correction_cap": 0.9}, None),
        ({"name": "cispo", "correction_cap": 0.9}, None),
        ({"name": "cispo", "correction_low": 1.5}, None),
        ({"kl_coefficient": 0.1, "kl_kind": "k1"}, 'kl_kind = "k1" in the loss'),
        ({"kl_coefficient": 0.1, "kl_kind": "k1", "kl_in": "reward"}, None),
        (
            {"kl_kind": "k1", "kl_in": "reward"},
            "effect (algorithm.kl_kind, algorithm.kl_in): algorithm.kl_coefficient is 0",
        ),
        ({"name": "grpo", "gae_lambda": 0.9}, "(algorithm.gae_lambda): grpo has no critic. Remove it"),
        ({"name": "ppo", "gae_lambda": 0.9, "discount": 0.9}, None),
        ({"name": "rloo", "discount": 0.9}, "(algorithm.discount): rloo discounts no rewards"),
        ({"name": "reinforce_plus_plus_baseline", "discount": 0.9}, None),
        (
            {"name": "rloo", "max_response_tokens": 9},
            '(algorithm.max_response_tokens): the aggregation is "sequence_sum"',
        ),
        ({"name": "rloo", "aggregation": "constant_length", "max_response_tokens": 9}, None),
    ],
)
def test_settings_without_effect_are_warned_of(config: dict[str, Any], warning: str | None) -> None:
    found = list(unused_settings(LearnerConfig(algorithm=AlgorithmConfig(**config)), 1))
    assert len(found) == (warning is not None)
    assert all(str(warning) in each for each in found)


@pytest.mark.parametrize(
    ("unread", "names", "read"),
    [
        (
            {"lora": LoraConfig(alpha=8.0, targets=("q_proj",))},
            "lora.alpha, lora.targets",
            {"lora": LoraConfig(rank=1)},
        ),
        ({"total_steps": 9, "learning_rate": 1e-3}, "total_steps", {"schedule": "linear", "total_steps": 11}),
        (CRITIC, "critic.value_clip", CRITIC | {"algorithm": AlgorithmConfig(name="ppo")}),
        (
            REFERENCE,
            "reference_dtype, offload of the ref",
            REFERENCE | {"algorithm": AlgorithmConfig(kl_coefficient=1)},
        ),
    ],
)
def test_settings_that_nothing_reads_are_warned_of(unread: dict[str, Any], names: str, read: dict[str, Any]) -> None:
    (warning,) = unused_settings(LearnerConfig(**unread), 1)
    assert warning.startswith(f"trainer.learner has settings without effect ({names}")
    assert not [each for each in unused_settings(LearnerConfig(**read), 1) if "settings without effect" in each]


def test_layers_are_kept_gathered_by_several_ranks_alone() -> None:
    found = [list(unused_settings(LearnerConfig(keep_gathered=True), ranks)) for ranks in (1, 2)]
    assert [len(warnings) for warnings in found] == [1, 0]


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"name": "dr_grpo"}, "algorithm.max_response_tokens must be set"),
        ({"name": "dr_grpo", "max_response_tokens": 9}, None),
        ({"name": "icepop", "correction_cap": 0.4}, "algorithm.correction_low is 0.5 and correction_cap 0.4"),
        ({"name": "icepop", "correction_cap": 0.4, "correction": "none"}, None),
        ({"name": "icepop", "correction_cap": 0.5}, None),
    ],
)
def test_algorithm_with_contradictory_settings_is_refused(config: dict[str, Any], problem: str | None) -> None:
    algorithm = AlgorithmConfig(**config)
    found = algorithm_problem(algorithm)
    assert (found or "").startswith(problem or "")
    assert (found is None) is (problem is None)
    with nullcontext() if problem is None else pytest.raises(ValueError, match=problem):
        resolve(algorithm)


def test_clip_ratio_needs_as_many_groups_as_mini_batches(tmp_path: Path) -> None:
    """A batch of one group takes one step, in which every ratio is 1."""
    learner = Learner(named("gspo"), save_tiny_model(tmp_path))
    found = [learner.update(make_batch(groups=groups, number=groups)) for groups in (1, 2)]
    assert ["clip_ratio/high" in metrics for metrics in found] == [False, True]


def test_algorithm_without_a_clip_reports_none() -> None:
    assert not clip_can_bind(named("rloo", mini_batches=4))
    assert clip_can_bind(LearnerConfig(algorithm=AlgorithmConfig(name="rloo", clip_high=0.2), mini_batches=4))


def test_learner_warns_of_a_clip_that_cannot_bind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = LearnerConfig(algorithm=AlgorithmConfig(clip_high=0.3))
    with caplog.at_level(logging.WARNING):
        Learner(config, save_tiny_model(tmp_path))
    assert "a clip without effect (clip_high)" in caplog.text
