"""Settings with which a run cannot learn, or not as its user expects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from infra.machine import visible_gpus
from infra.models.sizes import parameter_count
from operators.experience.evictions import Capacity
from operators.experience.samplers import Windowed
from operators.trainer.config import WITH_CRITIC, WITHOUT_GROUPS
from operators.trainer.presets import algorithm_problem, learning_rate, optimizer_steps, unused_settings
from pipelines.config import Config
from pipelines.run.warm_start import CACHE
from schemas.records.agents import AGENT

SMALL_MODEL = 30_000_000
"""Parameters below which a model hardly changes at the learning rates of pretrained ones."""
SMALL_RATE = 1e-5


def is_warm_start(config: Config) -> bool:
    """Whether the model is that of a warm start: a resumed run names it."""
    return Path(config.model.path).absolute().is_relative_to((config.run.folder / CACHE).absolute())


def unlearnable(config: Config) -> Iterator[str]:
    """Reasons why no batch of `config` can be trained, or no update, or not the last ones, can change the model."""
    name = config.trainer.learner.algorithm.name
    yield from _never_batched(config)
    if config.emulated:
        return
    if (problem := algorithm_problem(config.trainer.learner.algorithm)) is not None:
        yield f"trainer.learner.{problem}"
    if config.run.allow_no_learning:
        return
    learner, steps = config.trainer.learner, config.trainer.optimizer_steps
    warmup = learner.critic.warmup_batches if name in WITH_CRITIC else 0
    trained = steps - warmup
    accept = "accept this with run.allow_no_learning = true"
    if learner.learning_rate == 0:
        yield ("trainer.learner.learning_rate = 0: the model would not change. Set a rate above 0, or " + accept)
    elif steps and trained <= 0:
        yield (
            f"trainer.learner.critic.warmup_batches = {warmup}: all {steps} steps of trainer.optimizer_steps would "
            f"train the critic alone. Lower it, raise optimizer_steps, or {accept}"
        )
    elif steps and learning_rate(trained - 1, learner) == 0:
        after = f" that follow the {warmup} of critic.warmup_batches" if warmup else ""
        yield (
            f"trainer.learner.total_steps = {learner.total_steps}: the schedule ends at a learning rate of 0 before "
            f"the {trained} steps of trainer.optimizer_steps{after}, so the last of them would not change the model. "
            f"Set total_steps to {trained}, or a final_learning_rate. A run that has begun keeps its schedule: start a "
            f"new run from its weights, or {accept}"
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


def _never_batched(config: Config) -> Iterator[str]:
    """Reasons why the buffer can fill no batch, or refuses every group of a task."""
    buffer, tasks = config.experience, config.prompts.mixture
    batch, samples = buffer.global_batch, max(task.samples_per_prompt for task in tasks)
    name = buffer.sampler.name
    sampler = None if buffer.sampler.is_custom else buffer.make_sampler()
    window = Windowed() if getattr(sampler, "order_by", "") == "windowed" else sampler
    # Shards propose the groups of a window, and then those of the next, until a batch is full.
    if isinstance(window, Windowed) and buffer.divisions == 1 and window.window * samples < batch:
        yield (
            f"experience.sampler = {name!r} takes no others than the oldest {window.window} groups, of "
            f"samples_per_prompt = {samples}: they never fill a batch of experience.global_batch = {batch}. Set "
            f"{'a window' if window is sampler else 'another order_by, or windowed with a window'} above "
            f"{-(-batch // samples)}: groups lack members that failed"
        )
    for each in buffer.evictions:
        held = Capacity(**each.options).trajectories * buffer.shards if each.name == "capacity" else batch
        if held < batch:
            yield (
                f"experience.evictions: 'capacity' lets {held} trajectories be held, which never fill a batch of "
                f"experience.global_batch = {batch}: set trajectories to several batches"
            )
    for task in tasks:
        if name == "dynamic" and task.samples_per_prompt == 1 and task.environment != AGENT:
            yield (
                f"prompts.samples_per_prompt = 1, task {task.task_name!r}: experience.sampler = 'dynamic' refuses "
                "groups whose answers are all correct or all wrong, so each of them: set it to 2 or more (8 is usual)"
            )


def doubtful_settings(config: Config) -> Iterator[str]:
    """Settings that are rarely meant."""
    if config.warm_start is not None and config.model.path and not is_warm_start(config):
        yield (
            "[warm_start] has no effect beside model.path: it creates and trains a small model of its own. Remove one "
            "of them; to warm up a model of yours, train it on worked answers before the run"
        )
    batch = config.experience.global_batch
    for task in config.prompts.mixture:
        samples = task.samples_per_prompt
        if batch % samples:
            yield (
                f"experience.global_batch = {batch} is no multiple of samples_per_prompt = {samples}, task "
                f"{task.task_name!r}: batches consist of whole groups, so they have {-(-batch // samples) * samples}"
            )
    sampler = config.experience.sampler
    if sampler.name != "curriculum" and not sampler.is_custom and any(n > 1 for n in config.prompts.curricula.values()):
        yield (
            f"prompts.levels: experience.sampler = {sampler.name!r} requests no level, so all prompts are of the first "
            "one. Set the sampler 'curriculum', or one of yours"
        )
    if config.autoscaling is not None and not config.rollout.termination_notice_s:
        yield (
            "rollout.termination_notice_s = 0: a rollout that the autoscaler ends hands nothing over, so others "
            "compute the KV of its trajectories again. Set the seconds that it may take, such as 60, at most the "
            "time after which the system kills it"
        )
    if config.emulated:
        return
    size = _parameters(config)
    if size >= SMALL_MODEL and config.trainer.device == "cpu" and visible_gpus():
        yield (
            f"trainer.device = 'cpu', the default, on a machine with GPUs: it trains {size / 1e9:.2g} billion "
            "parameters on the CPU. Set trainer.device = 'cuda', and usually trainer.learner.precision = 'bfloat16'"
        )
    rate = config.trainer.learner.learning_rate
    if rate < SMALL_RATE and (small := _small_model(config)):
        yield (
            f"trainer.learner.learning_rate = {rate:g} is for pretrained models of a billion parameters; {small} "
            "hardly changes: 1e-4 to 1e-3 is usual"
        )
    yield from unused_settings(config.trainer.learner, config.trainer.ranks)
    mini_batches, _ = optimizer_steps(config.trainer.learner)
    groups = min(batch // task.samples_per_prompt for task in config.prompts.mixture)
    if 0 < groups < mini_batches:
        yield (
            f"a batch of {batch} has {groups} groups, fewer than the {mini_batches} mini-batches of algorithm "
            f"{config.trainer.learner.algorithm.name}: it takes {groups} optimizer steps. Set a larger "
            "experience.global_batch, or trainer.learner.mini_batches"
        )


def _small_model(config: Config) -> str:
    """What the model is, if it is known to be small; otherwise empty."""
    if not config.model.path:
        return "that of a warm start"
    size = _parameters(config)
    return f"one of {size / 1e6:.1f} million" if 0 < size < SMALL_MODEL else ""


def _parameters(config: Config) -> int:
    """The number of parameters of the model in `model.path`; 0 if unknown."""
    return parameter_count(Path(config.model.path)) if config.model.path else 0
