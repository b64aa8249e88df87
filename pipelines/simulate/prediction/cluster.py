"""The input of a prediction: a run's configuration with an emulated engine, and the overheads between its roles."""

from __future__ import annotations

from dataclasses import dataclass

from infra.setting_types import CheckedSettings, FiniteNonNegative, PositiveInt
from operators.experience.config import ExperienceConfig
from pipelines.config import Config

_IGNORED = ("over_age", "sampler", "writers", "evictions", "group_timeout_s")
"""Settings of `experience` that the predicted buffer, which trains groups as they complete, does not have."""


@dataclass(frozen=True)
class Overheads(CheckedSettings):
    """Times that no roofline has, in seconds of the run's own clock: they do not shrink with `run.time_scale`.

    Raises ValueError naming the field that is invalid.
    """

    hop_s: FiniteNonNegative = 0.1
    """From a record's publication to its fold in the next role: the transaction, the broker and the poll."""
    batch_s: FiniteNonNegative = 0.4
    """From the choice of a batch in the buffer to its arrival at the trainer: packing, transaction and reading."""


def uncalibrated(config: Config) -> str:
    """Why a run of `config` cannot be calibrated from, however long it is; empty if it can."""
    samples = sorted({task.samples_per_prompt for task in config.prompts.mixture})
    if len(samples) == 1:
        return ""
    return (
        f"prompts.tasks have samples_per_prompt of {', '.join(map(str, samples))}: runs whose groups differ in size "
        "are not predicted, neither from their configuration nor by --calibrate; set the same number in all tasks"
    )


@dataclass(frozen=True)
class Cluster(CheckedSettings):
    """The run to predict. A run is predicted as it is configured: in its own clock, with its `time_scale` and `stride`.

    `training_parts`: parts of a batch that the trainer may begin before the batch is complete (StreamRL).
    `train_gpus` and `gpus_per_replica` weigh idle time and cost; with `colocated` the trainer has the same GPUs.
    `autoscaled`: the run has [autoscaling], which this `config` need not have. `assumed` says what is assumed of a run
    whose engine is not emulated, and `weights_gb` has the GB of its weights, if known.
    """

    config: Config
    overheads: Overheads = Overheads()
    training_parts: PositiveInt = 1
    train_gpus: PositiveInt = 1
    gpus_per_replica: PositiveInt = 1
    colocated: bool = False
    autoscaled: bool = False
    assumed: tuple[str, ...] = ()
    weights_gb: float = 0.0

    def _check(self) -> None:
        config = self.config
        if not config.emulated:
            environment = next((task.environment for task in config.prompts.mixture if task.environment), "")
            if reason := uncalibrated(config):
                raise ValueError(reason)
            raise ValueError(
                f"rollout.engine is {config.rollout.engine!r}: only emulated runs are predicted. Let this run generate "
                "for some minutes, then give its folder in place of the configuration: --calibrate runs/NAME"
                + (f". Turns and waits of environments ({environment}) are not predicted" if environment else "")
            )
        if len(config.prompts.mixture) != 1:
            raise ValueError(
                f"prompts has {len(config.prompts.mixture)} tasks: of emulated runs only those with one are predicted, "
                "because all tasks have the lengths of rollout.emulation; remove prompts.tasks"
            )

    @property
    def not_predicted(self) -> list[str]:
        """The keys of settings that change a run, but not its prediction."""
        experience, plain = self.config.experience, ExperienceConfig()
        found = [f"experience.{key}" for key in _IGNORED if getattr(experience, key) != getattr(plain, key)]
        autoscaled = self.autoscaled or self.config.autoscaling is not None
        return [*found, "autoscaling"] if autoscaled else found

    @property
    def replicas(self) -> int:
        """Replicas of all rollout processes."""
        return self.config.rollout.replicas * self.config.rollout.processes

    @property
    def gpus(self) -> int:
        """All GPUs."""
        rollouts = self.replicas * self.gpus_per_replica
        return max(rollouts, self.train_gpus) if self.colocated else rollouts + self.train_gpus
