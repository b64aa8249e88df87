"""The effective settings of each example, compared with a reviewed golden file.

After a change of an example or default, run `python tests/pipelines/test_example_settings.py`, which also writes the
line of settings in each example, and review the diff.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY)]

import pytest  # noqa: E402

from operators.trainer.memory_plan import plan_rank, shape_of_config  # noqa: E402
from operators.trainer.presets import clip_can_bind, optimizer_steps, resolve_preset  # noqa: E402
from pipelines.config import Config, load_config  # noqa: E402
from pipelines.run.learnability import doubtful_settings, unlearnable  # noqa: E402
from pipelines.sequence_lengths import longest_sequence  # noqa: E402

EXAMPLES = sorted((REPOSITORY / "examples").glob("*.toml"))
SETUPS = sorted((REPOSITORY / "examples" / "setups").glob("*.toml"))
GOLDEN = Path(__file__).with_name("example_settings.json")


def settings(example: Path) -> dict[str, Any]:
    """The settings of `example` for devices, algorithm, batches and sequence lengths."""
    config = load_config(example, [])
    rollout, trainer, learner = config.rollout, config.trainer, config.trainer.learner
    name, preset = learner.algorithm.name, resolve_preset(learner.algorithm)
    mini_batches, epochs = optimizer_steps(learner)
    algorithm = learner.algorithm
    kl = f"{algorithm.kl_coefficient:g} of KL {algorithm.kl_kind} in the {algorithm.kl_in}"
    penalty = kl if algorithm.kl_coefficient else "no KL"
    activations = "activations recomputed" if learner.gradient_checkpointing else "activations kept"
    clip = f"clip {preset.clip.low:g}/{preset.clip.high:g}" if clip_can_bind(learner) else "no clip can act"
    return {
        "engine": rollout.engine,
        "rollout": f"{rollout.processes} x {rollout.tensor_parallel} of {devices(rollout.gpus)}, {rollout.dtype}",
        "trainer": f"{trainer.ranks} on {devices(trainer.gpus)}, {learner.precision}",
        "algorithm": f"{name}, {preset.aggregation}, weights up to {preset.correction.cap:g}, {clip}",
        "rate": f"{learner.learning_rate:g} after {learner.warmup_steps} batches, {learner.schedule}",
        "steps a batch": mini_batches * epochs,
        "batch": f"{config.experience.global_batch} in groups of {config.prompts.samples_per_prompt}",
        "lengths": f"{config.prompts.max_new_tokens} new, context {rollout.context or 'of the model'}",
        "micro-batch tokens": learner.micro_batch_tokens,
        "regularisation": f"norm {learner.max_gradient_norm:g}, weight decay {learner.weight_decay:g}, {penalty}",
        "checkpointing": f"weights every {trainer.checkpoint_every} batches, {activations}",
        "temperature": config.prompts.temperature,
    }


def stated(config: Config) -> str:
    """The line of settings that an example has above its machine: devices, precision, rate, lengths."""
    rollout, trainer, prompts = config.rollout, config.trainer, config.prompts
    context = f"a context of {rollout.context}" if rollout.context else "the model's context"
    lengths = f"{prompts.max_new_tokens} new tokens in {context}"
    if config.emulated:
        return f"# Settings: emulated engine, nothing is trained, {lengths}"
    places = [f"{len(gpus)} x GPU" if gpus else "CPU" for gpus in (rollout.gpus, trainer.gpus)]
    return (
        f"# Settings: rollout {places[0]}, {rollout.dtype}; trainer {places[1]}, {trainer.learner.precision}, "
        f"rate {trainer.learner.learning_rate:g}; {lengths}"
    )


def devices(gpus: tuple[int, ...]) -> str:
    return f"GPUs {', '.join(map(str, gpus))}" if gpus else "the CPU"


@pytest.mark.parametrize("example", [*EXAMPLES, *SETUPS], ids=lambda path: path.name)
def test_effective_settings_of_example_match_golden_file(example: Path) -> None:
    assert settings(example) == json.loads(GOLDEN.read_text())[example.name]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example_states_its_machine_and_fits_it(example: Path) -> None:
    config = load_config(example, [])
    lines = example.read_text("utf-8").splitlines()
    assert [line for line in lines if line.startswith("# Settings: ")] == [stated(config)]
    (machine,) = [line for line in lines if line.startswith("# Machine: ")]
    used = {*config.rollout.gpus, *config.trainer.gpus}
    assert ("eight GPUs" in machine) is bool(used)
    assert len(used) == len(config.rollout.gpus) + len(config.trainer.gpus)
    assert used <= set(range(8))
    assert (config.trainer.device == "cuda") is bool(config.trainer.gpus)
    assert not [*unlearnable(config), *doubtful_settings(config)]


def test_vllm_example_fits_the_model_that_it_states() -> None:
    example = REPOSITORY / "examples" / "vllm.toml"
    (stated_size,) = re.findall(r"about ([\d.]+) billion\n# parameters on 80 GB", example.read_text("utf-8"))
    of_qwen = {"hidden_size": 2048, "intermediate_size": 11_008, "num_attention_heads": 16, "num_key_value_heads": 2}
    shape = shape_of_config(of_qwen | {"vocab_size": 151_936, "tie_word_embeddings": True, "num_hidden_layers": 42})
    assert float(stated_size) * 1e9 <= shape.parameters
    config = load_config(example, [])
    assert plan_rank(shape, config.trainer, longest_sequence(config)).total <= 80 * 10**9


def test_only_small_models_have_a_large_learning_rate() -> None:
    configs = {example.name: load_config(example, []) for example in EXAMPLES}
    large = {name for name, config in configs.items() if config.trainer.learner.learning_rate > 1e-6}
    assert large == {name for name, config in configs.items() if is_demonstration(config)}


def state_settings(example: Path) -> None:
    """Write the line of settings above the machine of `example`."""
    text = re.sub("(?m)^# Settings: .*\n", "", example.read_text("utf-8"))
    example.write_text(text.replace("# Machine: ", f"{stated(load_config(example, []))}\n# Machine: ", 1), "utf-8")


def is_demonstration(config: Config) -> bool:
    return config.warm_start is not None


def test_documented_defaults_are_those_of_the_code() -> None:
    """Laminar's columns of the comparison with verl and TRL; the demonstrations' has what differs."""
    text = (REPOSITORY / "docs" / "training.md").read_text("utf-8")
    section = text.partition("\n## Defaults compared with verl and TRL\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    default = compared(Config())
    demonstration = compared(load_config(REPOSITORY / "examples" / "chain_sum.toml"))
    assert {row[0]: row[1] for row in rows} == default
    differing = {name: value for name, value in demonstration.items() if value != default[name]}
    assert {row[0]: row[2] for row in rows if row[2]} == differing


def compared(config: Config) -> dict[str, str]:
    """The settings of `config` that the table compares, as it writes them."""
    learner, prompts, critic = config.trainer.learner, config.prompts, config.trainer.learner.critic
    algorithm, preset = learner.algorithm, resolve_preset(learner.algorithm)
    mini_batches, epochs = optimizer_steps(learner)
    names = {"tis": "`tis`: GRPO's advantage, token mean"}
    ratios = {"update_start": "policy at the start of the update", "behaviour": "rollout's policy"}
    return {
        "algorithm": names.get(algorithm.name, f"`{algorithm.name}`"),
        "learning rate, warm-up": f"{rate(learner.learning_rate)}, {learner.warmup_steps} batches",
        "schedule": learner.schedule,
        "AdamW betas, weight decay": f"{learner.betas[0]:g} / {learner.betas[1]:g}, {learner.weight_decay:g}",
        "gradient norm": str(learner.max_gradient_norm),
        "batch": f"{config.experience.global_batch} sequences",
        "optimizer steps per batch": str(mini_batches * epochs),
        "samples per prompt": str(prompts.samples_per_prompt),
        "temperature, top-p": f"{prompts.temperature}, {'off' if prompts.top_p == 1 else prompts.top_p}",
        "aggregation": preset.aggregation.replace("_", " "),
        "clip, low / high": f"{preset.clip.low:g} / {preset.clip.high:g}",
        "dual clip c": "off" if algorithm.dual_clip is None else str(algorithm.dual_clip),
        "importance ratio against": ratios[preset.proximal],
        "off-policy weight π_o/μ": f"per {preset.correction.level}, at most {preset.correction.cap:g}",
        "KL penalty": str(algorithm.kl_coefficient or "off"),
        "advantage scale": "group standard deviation",  # of both algorithms: test_advantages.py
        "λ and γ of GAE": f"{algorithm.gae_lambda:g}, {algorithm.discount:g}",
        "critic rate, value clip": f"{rate(critic.learning_rate)}, {critic.value_clip:g}",
    }


def rate(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-")


if __name__ == "__main__":
    for each in EXAMPLES:
        state_settings(each)
    GOLDEN.write_text(json.dumps({each.name: settings(each) for each in [*EXAMPLES, *SETUPS]}, indent=1) + "\n")
