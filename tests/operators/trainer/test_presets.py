"""Presets mean what their papers mean, the documentation says so, and a clip that cannot act is reported."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from optimizer_steps import record_steps
from trainer_batches import make_batch, save_tiny_model

from operators.trainer.config import AlgorithmConfig, AlgorithmName, LearnerConfig
from operators.trainer.learner import Learner
from operators.trainer.presets import PRESETS, clip_can_bind, optimizer_steps, preset_table, unused_clip_warning
from pipelines.config import Config, load_config

ROOT = Path(__file__).parents[3]
TRAINING = ROOT / "docs" / "training.md"


def named(name: AlgorithmName, **changes: object) -> LearnerConfig:
    return LearnerConfig(algorithm=AlgorithmConfig(name=name, max_response_tokens=20), **changes)  # type: ignore[arg-type]


def test_documentation_has_the_presets() -> None:
    assert "\n".join(preset_table()) in TRAINING.read_text("utf-8"), "\n".join(preset_table())


def test_documented_defaults_are_those_of_the_code() -> None:
    """Laminar's columns of the comparison with verl and TRL; the demonstrations' has what differs."""
    text = TRAINING.read_text("utf-8").partition("\n## Defaults compared with verl and TRL\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")][2:]
    default, demonstration = settings(Config()), settings(load_config(ROOT / "examples" / "chain_sum.toml"))
    assert {row[0].strip(): row[1].strip() for row in rows} == default
    differing = {name: value for name, value in demonstration.items() if value != default[name]}
    assert {row[0].strip(): row[2].strip() for row in rows if row[2].strip()} == differing


def settings(config: Config) -> dict[str, str]:
    """The first column of the table, and the settings of `config` as the others write them."""
    learner, prompts, critic = config.trainer.learner, config.prompts, config.trainer.learner.critic
    algorithm, preset = learner.algorithm, PRESETS[learner.algorithm.name]
    low, high = algorithm.clip_low, algorithm.clip_high
    own = {"tis": "`tis`: GRPO's advantage, token mean"}
    start = (algorithm.proximal or preset.proximal) == "update_start"
    level, cap = algorithm.correction_level or "token", algorithm.correction_cap or preset.correction.cap
    steps = optimizer_steps(learner)
    return {
        "algorithm": own.get(algorithm.name, f"`{algorithm.name}`"),
        "learning rate, warm-up": f"{rate(learner.learning_rate)}, {learner.warmup_steps} batches",
        "schedule": learner.schedule,
        "AdamW betas, weight decay": f"{learner.betas[0]:g} / {learner.betas[1]:g}, {learner.weight_decay:g}",
        "gradient norm": str(learner.max_gradient_norm),
        "batch": f"{config.experience.global_batch} sequences",
        "optimizer steps per batch": str(steps[0] * steps[1]),
        "samples per prompt": str(prompts.samples_per_prompt),
        "temperature, top-p": f"{prompts.temperature}, {'off' if prompts.top_p == 1 else prompts.top_p}",
        "aggregation": (algorithm.aggregation or preset.aggregation).replace("_", " "),
        "clip, low / high": f"{low or preset.clip.low:g} / {high or preset.clip.high:g}",
        "dual clip c": "off" if algorithm.dual_clip is None else str(algorithm.dual_clip),
        "importance ratio against": "policy at the start of the update" if start else "rollout's policy",
        "off-policy weight π_o/μ": f"per {level}, at most {cap:g}",
        "KL penalty": str(algorithm.kl_coefficient or "off"),
        "advantage scale": "group standard deviation",  # of both algorithms; test_advantages has what they compute
        "λ and γ of GAE": f"{algorithm.gae_lambda:g}, {algorithm.discount:g}",
        "critic rate, value clip": f"{rate(critic.learning_rate)}, {critic.value_clip:g}",
    }


def rate(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-")


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
