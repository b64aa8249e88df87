"""Settings with which a run cannot learn, or not as its user expects."""

from __future__ import annotations

from collections.abc import Iterator

from operators.trainer.config import WITHOUT_GROUPS
from pipelines.config import Config


def unlearnable(config: Config) -> Iterator[str]:
    """Reasons why no update of `config` can change the model."""
    name = config.trainer.learner.algorithm.name
    if config.emulated or config.run.allow_no_learning:
        return
    if config.trainer.learner.learning_rate == 0:
        yield (
            "trainer.learner.learning_rate = 0: the model would not change. Set a rate above 0, or accept this with "
            "run.allow_no_learning = true"
        )
    if name in WITHOUT_GROUPS:
        return
    for task in config.prompts.mixture:
        if task.samples_per_prompt == 1:
            yield (
                f"prompts.samples_per_prompt = 1, task {task.task_name!r}: the advantage of {name} compares the "
                "samples of a prompt, so every advantage would be 0: set it to 2 or more (8 is usual), or "
                f"trainer.learner.algorithm.name to one of {', '.join(sorted(WITHOUT_GROUPS))}"
            )


def doubtful_settings(config: Config) -> Iterator[str]:
    """Settings that are rarely meant."""
    batch = config.experience.global_batch
    for task in config.prompts.mixture:
        samples = task.samples_per_prompt
        if batch % samples:
            yield (
                f"experience.global_batch = {batch} is no multiple of samples_per_prompt = {samples}, task "
                f"{task.task_name!r}: batches consist of whole groups, so they have {-(-batch // samples) * samples}"
            )
