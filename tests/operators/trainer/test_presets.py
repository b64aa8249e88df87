"""Presets mean what their papers mean, the documentation says so, and a clip that cannot act is reported."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from optimizer_steps import record_steps
from trainer_batches import make_batch, save_tiny_model

from operators.trainer.config import AlgorithmConfig, AlgorithmName, LearnerConfig
from operators.trainer.learner import Learner
from operators.trainer.presets import PRESETS, UNCLIPPED, clip_can_bind, optimizer_steps, unused_clip_warning
from pipelines.present.topic_table import markdown

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
                str(preset.mini_batches * preset.epochs),
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


def test_algorithm_without_a_clip_reports_none() -> None:
    assert not clip_can_bind(named("rloo", mini_batches=4))
    assert clip_can_bind(LearnerConfig(algorithm=AlgorithmConfig(name="rloo", clip_high=0.2), mini_batches=4))


def test_learner_warns_of_a_clip_that_cannot_bind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = LearnerConfig(algorithm=AlgorithmConfig(clip_high=0.3))
    with caplog.at_level(logging.WARNING):
        Learner(config, save_tiny_model(tmp_path))
    assert "a clip without effect (clip_high)" in caplog.text
