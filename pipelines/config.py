"""The configuration of a run: one section an operator, read from TOML; mistakes are named with the nearest key."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import tomli_w
from pydantic import TypeAdapter, ValidationError

from infra.kafka.properties import ClientProperties
from infra.models.sizes import context_length, vocabulary_size
from infra.name_lookup import suggest_name
from operators.evaluation.config import EvaluationConfig
from operators.experience.config import ExperienceConfig
from operators.placement.config import PlacementConfig
from operators.prompts.config import PromptsConfig, TaskConfig
from operators.relay.config import RelayConfig
from operators.rollout.config import RolloutConfig
from operators.rollout.emulation_config import DEFAULT_CONTEXT
from operators.score.config import Rubric, ScoreConfig
from operators.trainer.training_config import TrainingConfig
from operators.trainer.warm_start_config import WarmStartConfig
from pipelines.progress_config import ProgressConfig
from schemas.topics import run_prefix

_SHARED: Mapping[str, type] = {"prompts": TaskConfig, "score": Rubric}
"""Sections with tasks, and the class whose keys a task takes over from its section where it does not set them."""
_PROMPTS: Mapping[str, Any] = {"task": "chain_sum"}
"""What is asked where a configuration does not say."""


ROLE, ADMIN = "{role}", "admin"
"""In the name of a client.properties file, who reads it; and who does where no pipeline does."""


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names file, key and what would do."""


TrackerName = Literal["mlflow", "tensorboard", "trackio", "wandb"]


@dataclass(frozen=True)
class RunConfig:
    """The run itself. `name` stands in its topics; empty: made of the time. `folder` holds all runs."""

    name: str = ""
    folder: Path = Path("runs")
    seed: int = 0
    """Seed of prompts, sampling and warm start, where their own sections do not set one."""
    time_scale: float = 1.0
    """Emulated seconds in one second, where rollout.engine is emulated."""
    trackers: tuple[TrackerName, ...] = ()
    """Where metrics go besides the run's own metrics.jsonl; each needs the extra of its name."""
    audit_every_s: float = 120.0
    """Seconds between audits of the run while it works, more where an audit takes long; 0: only at its end."""

    def __post_init__(self) -> None:
        if not 0 <= self.audit_every_s < float("inf"):
            raise ValueError(f"audit_every_s must be 0 or more, not {self.audit_every_s}")
        if not 0 < self.time_scale < float("inf"):
            raise ValueError(f"time_scale must be positive, not {self.time_scale}")
        if self.name:
            run_prefix(self.name)


@dataclass(frozen=True)
class KafkaConfig:
    """Where the log is. Without `bootstrap_servers` `laminar run` starts a broker of its own in the run's folder."""

    bootstrap_servers: str = ""
    client_properties: str = ""
    """A client.properties file with Java's names: security, time-outs. `{role}` in its name stands for the pipeline
    that reads it, and for `admin` where none does."""
    partitions: int = 1
    """Partitions of the data topics, fixed for a run: as many as a role may ever have shards."""
    replication_factor: int = -1
    """Copies of each partition; -1: as the brokers have it."""
    outage_timeout_s: float = 180.0
    """How long `laminar run` goes on without an answer from Kafka."""
    transaction_timeout_s: float = 60.0
    """How long one transaction may take, at most the brokers' transaction.max.timeout.ms (15 minutes by default). An
    open transaction of a process that died holds back readers for so long, unless its successor starts earlier."""
    metrics_hours: float = 168.0
    """How long the topic of measurements keeps them; inf: for good. `metrics.jsonl` in the run's folder has all."""

    def __post_init__(self) -> None:
        if self.partitions < 1:
            raise ValueError(f"partitions must be at least 1, not {self.partitions}")
        if self.replication_factor != -1 and self.replication_factor < 1:
            raise ValueError(f"replication_factor must be at least 1, or -1, not {self.replication_factor}")
        if not self.outage_timeout_s > 0:
            raise ValueError(f"outage_timeout_s must be positive, not {self.outage_timeout_s}")
        if not 1 <= self.transaction_timeout_s <= 3600:
            raise ValueError(f"transaction_timeout_s must be from 1 to 3600, not {self.transaction_timeout_s}")
        if not self.metrics_hours >= 1:
            raise ValueError(f"metrics_hours must be at least 1, not {self.metrics_hours}")

    def for_role(self, role: str) -> KafkaConfig:
        """As `role` reads it."""
        return dataclasses.replace(self, client_properties=self.client_properties.replace(ROLE, role))

    def client(self) -> ClientProperties:
        """How to reach the brokers. Raises ConfigError without an address."""
        entries = {"bootstrap.servers": self.bootstrap_servers} if self.bootstrap_servers else {}
        if self.client_properties:
            return ClientProperties.from_file(Path(self.for_role(ADMIN).client_properties), **entries)
        if not entries:
            raise ConfigError("kafka.bootstrap_servers is not set: name a broker, or let `laminar run` start one")
        return ClientProperties.at(self.bootstrap_servers)


@dataclass(frozen=True)
class ModelConfig:
    """The model to train: a local Hugging Face folder. Empty: the warm start makes a small one."""

    path: str = ""


@dataclass(frozen=True)
class Config:
    """Everything that a run needs to know."""

    run: RunConfig = field(default_factory=RunConfig)
    kafka: KafkaConfig = field(default_factory=KafkaConfig)
    progress: ProgressConfig = field(default_factory=ProgressConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    warm_start: WarmStartConfig | None = None
    prompts: PromptsConfig = field(default_factory=lambda: PromptsConfig(**_PROMPTS))
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    relay: RelayConfig = field(default_factory=RelayConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)
    experience: ExperienceConfig = field(default_factory=ExperienceConfig)
    trainer: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        mixture = self.prompts.mixture
        for task in mixture:
            self.rollout.check_environment(task.environment)
        if all(task.name or task.source == "reasoning_gym" for task in mixture):  # else rows of files name their tasks
            self.score.check_tasks([task.called for task in mixture])
        if self.experience.shards > self.kafka.partitions:
            raise ValueError(
                f"experience.shards must be at most kafka.partitions, of which each needs one, not "
                f"{self.experience.shards} of {self.kafka.partitions}"
            )
        if self.emulated and self.trainer.ranks > 1:
            raise ValueError(f"trainer.ranks must be 1 where the trainer is emulated, not {self.trainer.ranks}")
        if self.experience.over_age == "wait":
            self._check_waiting()

    def _check_waiting(self) -> None:
        """Raise ValueError for what would let trajectories exceed a bound that `over_age = "wait"` guarantees."""
        rules, most = self.placement.rules, self.experience.max_staleness + 1
        if rules.refresh == "interrupt":
            raise ValueError(
                "experience.over_age = 'wait' needs a placement.refresh that interrupts nothing, not 'interrupt' "
                f"(placement.schedule is {self.placement.schedule!r})"
            )
        if rules.admitted_batches is not None and rules.admitted_batches > most:
            raise ValueError(
                f"experience.over_age = 'wait' needs placement.admitted_batches of at most {most} "
                f"(experience.max_staleness + 1), not {rules.admitted_batches}"
            )

    @property
    def run_folder(self) -> Path:
        """Where this run leaves everything."""
        return self.run.folder / self.run.name

    @property
    def emulated(self) -> bool:
        """Whether rollouts and trainer are emulated: then there is no model, no weights and no evaluation."""
        return self.rollout.engine == "emulated"

    @property
    def context(self) -> int:
        """Tokens of prompt and response together. Raises ConfigError without a model, ValueError if it is none."""
        if self.rollout.context is not None:
            return self.rollout.context
        if self.emulated:
            return DEFAULT_CONTEXT // self.rollout.emulation.stride
        return context_length(self.model_folder())

    @property
    def vocabulary(self) -> int | None:
        """Tokens that the model knows; None where no model is named. Raises ConfigError or ValueError as `context`."""
        return None if self.emulated or not self.model.path else vocabulary_size(self.model_folder())

    @property
    def admitted(self) -> int:
        """Training trajectories that may be outstanding at once."""
        return self.placement.admitted(self.experience.global_batch, self.experience.max_staleness)

    def model_folder(self) -> Path:
        """The model's folder. Raises ConfigError if there is none."""
        folder = Path(self.model.path)
        if not self.model.path:
            raise ConfigError("model.path is not set: name a Hugging Face folder, or give a [warm_start] section")
        if not folder.is_dir():
            raise ConfigError(f"model.path: there is no folder {folder}")
        return folder


def load_config(file: Path, changes: Sequence[str] = ()) -> Config:
    """The configuration in TOML file `file`, with `changes` ("a.b=value", TOML values or bare words) on top.

    Raises ConfigError.
    """
    try:
        table = tomllib.loads(file.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"there is no config file {file}") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error
    for change in changes:
        _apply(table, change)
    return parse_config(table, str(file))


def parse_config(table: dict[str, Any], origin: str) -> Config:
    """The configuration in `table`, which `origin` names in errors. Raises ConfigError."""
    _check_keys(Config, table, origin, ())
    table = {"prompts": _PROMPTS, **table}
    run = table.get("run", {})
    if isinstance(run, dict) and "seed" in run:
        for section in ("prompts", "warm_start"):
            if isinstance(table.get(section), dict):
                table[section] = {"seed": run["seed"], **table[section]}
    for section, kind in _SHARED.items():
        if isinstance(table.get(section), dict):
            table[section] = _with_whole_tasks(table[section], kind)
    try:
        # TOML says what type a value has, so nothing is converted; from JSON a strict reader takes lists for tuples.
        return TypeAdapter(Config).validate_json(json.dumps(table, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError("\n".join(_describe(origin, problem) for problem in error.errors())) from error


def save_config(config: Config, file: Path) -> None:
    """Write `config` as TOML that `load_config` reads back to an equal one."""
    file.write_bytes(tomli_w.dumps(_without_none(TypeAdapter(Config).dump_python(config, mode="json"))).encode())


def flattened(config: Config) -> dict[str, Any]:
    """The value of every key of `config` by its dotted name; optional keys that are unset are missing."""

    def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                yield from leaves(item, f"{name}.{key}" if name else key)
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            for number, item in enumerate(value):
                yield from leaves(item, f"{name}[{number}]")
        else:
            yield name, value

    return dict(leaves(_without_none(TypeAdapter(Config).dump_python(config, mode="json")), ""))


def _with_whole_tasks(section: dict[str, Any], kind: type) -> dict[str, Any]:
    """`section` with tasks that say everything: what they leave out of the keys of `kind` is what the section says."""
    if not isinstance(section.get("tasks"), list):
        return section
    keys = {field.name for field in dataclasses.fields(kind)} - {"name", "weight"}
    shared = {name: value for name, value in section.items() if name in keys}
    return {**section, "tasks": [{**shared, **row} if isinstance(row, dict) else row for row in section["tasks"]]}


def _apply(table: dict[str, Any], change: str) -> None:
    name, equals, text = change.partition("=")
    if not equals or not name:
        raise ConfigError(f"--set {change!r}: expected section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *path, last = name.strip().split(".")
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {change!r}: {part} is no section")
    table[last] = value


def _check_keys(kind: type, table: Mapping[str, Any], origin: str, path: tuple[str, ...]) -> None:
    hints = get_type_hints(kind)
    valid = [f.name for f in dataclasses.fields(kind)]
    for name, value in table.items():
        dotted = ".".join((*path, name))
        if name not in valid:
            raise ConfigError(f"{origin}: unknown key {dotted}{suggest_name(name, valid)}")
        inner = next((t for t in (hints[name], *get_args(hints[name])) if dataclasses.is_dataclass(t)), None)
        if inner is None:
            continue
        rows: Iterable[Any] = value if isinstance(value, list) else [value]
        for row in rows:
            if isinstance(row, dict):
                _check_keys(inner, row, origin, (*path, name))  # type: ignore[arg-type]


def _describe(origin: str, problem: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    given = problem.get("input")
    shown = "" if isinstance(given, dict | list) else f" (it is {given!r})"
    return f"{origin}: {where}: {message}{shown}"


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
