"""The configuration of a run, read from TOML: one section per operator. Errors name the key and suggest the nearest."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from annotated_types import Ge, Le

from infra.deploy.config import DeployConfig
from infra.files import access_error, write_atomically
from infra.kafka.properties import ClientProperties
from infra.models.sizes import context_length, vocabulary_size
from infra.name_lookup import suggest_name
from infra.setting_types import CheckedSettings, Positive, PositiveInt, requirement
from operators.agents.config import AgentsConfig
from operators.autoscaler.config import AutoscalingConfig
from operators.evaluation.config import EvaluationConfig
from operators.experience.config import ExperienceConfig
from operators.gateway.config import GatewayConfig
from operators.placement.config import PlacementConfig
from operators.prompts.config import PromptsConfig, TaskConfig
from operators.relay.config import RelayConfig
from operators.rollout.config import RolloutConfig
from operators.rollout.emulation_config import DEFAULT_CONTEXT
from operators.score.config import Rubric, ScoreConfig
from operators.trainer.config import BUILT_IN_LEARNER
from operators.trainer.training_config import TrainingConfig
from operators.trainer.warm_start_config import WarmStartConfig
from pipelines.config_changes import apply_change, is_about_a_change
from pipelines.config_draft import adapter, names_any, valid_part
from pipelines.config_paths import beside
from pipelines.config_table import add_named_environments, complete_tasks, unknown_keys, without_inherited
from pipelines.roles import ADMIN, ROLE
from pipelines.run_config import SEEDS, ProgressConfig, RunConfig
from pipelines.shared_devices import check_devices
from schemas.records.agents import AGENT

_TASK_CLASSES: Mapping[str, type] = {"prompts": TaskConfig, "score": Rubric}
"""Sections with tasks, and the class whose keys a task inherits from its section unless it sets them itself."""
_DEFAULT_PROMPTS: Mapping[str, Any] = {"task": "chain_sum"}
"""The default [prompts] section."""
_OF_BOUNDS = {"greater_than_equal", "greater_than", "less_than_equal", "less_than", "predicate_failed"}
"""The types of pydantic's errors about the bounds of `infra.setting_types`."""


class ConfigError(ValueError):
    """The configuration cannot be used. The message names the file, the key and the valid values."""


class ConfigProblems(ConfigError):
    """Several reasons why a run cannot start, or for `what`; `detail_lines` has them, a line each, with tracebacks.

    It has none if they `are_printed` already.
    """

    def __init__(self, problems: Sequence[str], what: str = "", *, are_printed: bool = False) -> None:
        one, what_failed = len(problems) == 1, what or "the run cannot start"
        if are_printed:
            text = f"{what_failed}: {'the problem' if one else f'the {len(problems)} problems'} above"
        elif one:
            text = f"{what}: {problems[0]}" if what else problems[0]
        else:
            text = f"{what_failed}: {len(problems)} problems"
        super().__init__(text.partition("\n")[0])
        lines = [line for problem in problems for line in problem.split("\n")]
        self.detail_lines = () if are_printed else tuple(lines[1:] if one else lines)


@dataclass(frozen=True)
class KafkaConfig(CheckedSettings):
    """The Kafka cluster. Without `bootstrap_servers`, `laminar run` starts a local broker in the run's folder."""

    bootstrap_servers: str = ""
    """Addresses of the brokers, `host:port` separated by commas; empty: `laminar run` starts a broker of its own."""
    client_properties: str = ""
    """A client.properties file with the Java clients' property names: security, timeouts. `{role}` in its path stands
    for the pipeline that reads it, and for `admin` in commands."""
    partitions: PositiveInt = 1
    """Partitions of the data topics, fixed for a run: the upper bound on the shards of any role."""
    replication_factor: int = -1
    """Replicas of a partition; from 3 on min.insync.replicas is a majority. -1: as the brokers; Kubernetes: 3."""
    outage_timeout_s: Positive = 180.0
    """How long Kafka may be unreachable before `laminar run` fails."""
    transaction_timeout_s: Annotated[float, Ge(1), Le(3600)] = 60.0
    """transaction.timeout.ms of all producers, at most the brokers' transaction.max.timeout.ms (by default 15 minutes,
    of a run's own broker an hour). An open transaction of a dead process blocks read_committed consumers for this long,
    unless its successor starts earlier."""
    metrics_hours: Annotated[float, Ge(1)] = 168.0
    """Retention of the metrics topic; inf: unlimited. `metrics.jsonl` keeps them, see docs/evaluation.md."""

    def _check(self) -> None:
        if self.replication_factor != -1 and self.replication_factor < 1:
            raise ValueError(f"replication_factor must be at least 1, or -1, not {self.replication_factor}")

    def for_role(self, role: str) -> KafkaConfig:
        """The section with `{role}` replaced by `role`."""
        return dataclasses.replace(self, client_properties=self.client_properties.replace(ROLE, role))

    @property
    def address_setting(self) -> str:
        """The setting that has the brokers' addresses, for errors."""
        in_file = f"bootstrap.servers in {self.client_properties} (kafka.client_properties)"
        return "kafka.bootstrap_servers" if self.bootstrap_servers or not self.client_properties else in_file

    def client(self) -> ClientProperties:
        """Client properties for the brokers. Raises ConfigError if no address is configured."""
        entries = {"bootstrap.servers": self.bootstrap_servers} if self.bootstrap_servers else {}
        if self.client_properties:
            return ClientProperties.from_file(Path(self.for_role(ADMIN).client_properties), **entries)
        if not entries:
            raise ConfigError("kafka.bootstrap_servers is not set: name a broker, or let `laminar run` start one")
        return ClientProperties.at(self.bootstrap_servers)


@dataclass(frozen=True)
class ModelConfig:
    """The model to train: a local Hugging Face folder. If empty, the warm start creates a small model."""

    path: str = ""
    """A local Hugging Face folder with model and tokenizer; empty: the warm start makes a small model."""


@dataclass(frozen=True)
class Config:
    """The whole configuration of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    kafka: KafkaConfig = field(default_factory=KafkaConfig)
    progress: ProgressConfig = field(default_factory=ProgressConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    warm_start: WarmStartConfig | None = None
    prompts: PromptsConfig = field(default_factory=lambda: PromptsConfig(**_DEFAULT_PROMPTS))
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    relay: RelayConfig = field(default_factory=RelayConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)
    experience: ExperienceConfig = field(default_factory=ExperienceConfig)
    trainer: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    deploy: DeployConfig = field(default_factory=DeployConfig)
    gateway: GatewayConfig | None = None
    agents: AgentsConfig | None = None
    autoscaling: AutoscalingConfig | None = None

    def __post_init__(self) -> None:
        mixture = self.prompts.mixture
        self._check_agents([task.environment for task in mixture])
        if all(task.name or task.source == "reasoning_gym" for task in mixture):  # else rows name their tasks
            self.score.check_tasks([task.task_name for task in mixture])
        shards = {f"{key}.shards": getattr(self, key).shards for key in ("score", "experience")}
        for key, count in (shards | {"experience.max_shards": self.experience.max_shards}).items():
            if count > (most := self.kafka.partitions):
                raise ValueError(f"{key} is {count}, but each shard needs a partition: kafka.partitions is {most}")
        if self.emulated_training and self.trainer.shares > 1:
            found = f"{self.trainer.ranks} and {self.trainer.shares}"
            raise ValueError(f"trainer.ranks and trainer.batch_shares must be 1 for an emulated trainer, not {found}")
        if self.rollout.dtype is None:
            dtype: Literal["float32", "bfloat16"] = "float32" if self.trainer.device == "cpu" else "bfloat16"
            object.__setattr__(self, "rollout", dataclasses.replace(self.rollout, dtype=dtype))
        check_devices(self.trainer, self.rollout, self.autoscaling)
        self.placement.check_heartbeats(rollout=self.rollout.heartbeat_s, relay=self.relay.heartbeat_s)
        if self.experience.over_age == "wait":
            self._check_staleness_bound()
        if self.autoscaling is not None:
            self.autoscaling.most(self.rollout.replicas, self.inboxes)

    def _check_agents(self, environments: Sequence[str]) -> None:
        """Raise ValueError unless agents, gateway and the prompts for agents are configured together."""
        if AGENT in environments and not self.has_gateway:
            raise ValueError(
                f"prompts.environment = {AGENT!r} needs a section [agents] with a command or a function, or [gateway] "
                "for agents elsewhere"
            )
        if self.agents is not None and AGENT not in environments:
            raise ValueError(f"[agents] needs prompts for agents: set prompts.environment = {AGENT!r}")
        if self.has_gateway and self.emulated:
            raise ValueError("agents need an engine that generates text, not rollout.engine = 'emulated'")
        if self.has_gateway and self.placement.rules.refresh == "slot":
            raise ValueError("agents work with one weight version a replica, not with placement.refresh = 'slot'")

    @property
    def inboxes(self) -> int:
        """The number of replicas that can have an inbox."""
        return max(self.rollout.total_replicas, self.placement.max_replicas)

    @property
    def has_gateway(self) -> bool:
        """Whether the run has a gateway."""
        return self.gateway is not None or self.agents is not None

    def _check_staleness_bound(self) -> None:
        """Raise ValueError for settings that break the staleness bound of `over_age = "wait"`."""
        rules, most = self.placement.rules, self.experience.max_staleness + 1
        if rules.refreshes_at_once:  # within trajectories, or trajectories begin under the versions before
            raise ValueError(
                f"experience.over_age = 'wait' does not work with placement.refresh = {rules.refresh!r} "
                f"(placement.schedule is {self.placement.schedule!r})"
            )
        if rules.admitted_batches is not None and rules.admitted_batches > most:
            raise ValueError(
                f"experience.over_age = 'wait' needs placement.admitted_batches of at most {most} "
                f"(experience.max_staleness + 1), not {rules.admitted_batches}"
            )

    @property
    def run_folder(self) -> Path:
        """The folder of all files of this run."""
        return self.run.folder / self.run.name

    @property
    def emulated(self) -> bool:
        """Whether rollouts are emulated: such a run has no model, no weights and no evaluation."""
        return self.rollout.engine == "emulated"

    @property
    def emulated_training(self) -> bool:
        """Whether the trainer is emulated, too: it is unless `trainer.learner.name` names a learner."""
        return self.emulated and self.trainer.learner.name == BUILT_IN_LEARNER

    @property
    def context(self) -> int:
        """Tokens of prompt and response together. Raises ConfigError without a model, ValueError if it is invalid."""
        if self.rollout.context is not None:
            return self.rollout.context
        if self.emulated:
            return DEFAULT_CONTEXT // self.rollout.emulation.stride
        return context_length(self.model_folder())

    @property
    def vocabulary(self) -> int | None:
        """Vocabulary size; None if no model is configured. Raises ConfigError or ValueError as `context`."""
        return None if self.emulated or not self.model.path else vocabulary_size(self.model_folder())

    @property
    def plain_agents(self) -> bool:
        """Whether the gateway formats agents' messages without a chat template, even if the model has one."""
        return self.gateway is not None and self.gateway.template == "plain"

    @property
    def admitted(self) -> int:
        """The maximum number of outstanding training trajectories."""
        return self.placement.admitted(self.experience.global_batch, self.experience.max_staleness)

    def model_folder(self) -> Path:
        """The model's folder. Raises ConfigError if it is not configured or does not exist."""
        folder = Path(self.model.path)
        if not self.model.path:
            raise ConfigError("model.path is not set: name a Hugging Face folder, or give a [warm_start] section")
        if (denied := access_error(folder)) or not folder.is_dir():
            raise ConfigError(f"model.path: there is no folder {folder}{denied and f' ({denied})'}")
        return folder


@dataclass(frozen=True)
class ConfigDraft:
    """The valid part of the configuration `origin`, in `config`; `problems` has the reasons why the rest is not valid.

    The user's value of a setting in `replaced` is not in `config`, or its meaning depends on such a value. So checks
    of `config` report nothing about these settings.
    """

    config: Config
    origin: str = ""
    problems: tuple[str, ...] = ()
    replaced: frozenset[str] = frozenset()

    def checked(self) -> Config:
        """The configuration. Raises ConfigProblems if a setting is wrong."""
        if self.problems:
            raise ConfigProblems(self.problems, f"{self.origin} is not valid" if len(self.problems) > 1 else "")
        return self.config

    def problems_and(self, found: Iterable[str]) -> tuple[str, ...]:
        """The problems, and those of `found` that are not about a replaced setting."""
        return (*self.problems, *(each for each in found if not names_any(each, self.replaced)))


def load_config(file: Path, changes: Sequence[str] = ()) -> Config:
    """Load the TOML file `file` and apply `changes` ("a.b=value", with TOML values or bare words).

    Paths of what a run reads are relative to the folder of `file`, those in `changes` to the working directory. Raises
    ConfigError.
    """
    return read_config(file, changes).checked()


def read_config(file: Path, changes: Sequence[str] = ()) -> ConfigDraft:
    """As `load_config`, but raises ConfigError only for a file that is not TOML, not for wrong settings."""
    try:
        table = beside(file.parent, tomllib.loads(file.read_text("utf-8")))
    except FileNotFoundError as error:
        raise ConfigError(f"config file {file} does not exist") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error
    return draft_config(table, str(file), changes)


def parse_config(table: dict[str, Any], origin: str, changes: Sequence[str] = ()) -> Config:
    """Parse and validate `table` with `changes`; errors name it as `origin`, those of a change `--set`.

    Raises ConfigError.
    """
    return draft_config(table, origin, changes).checked()


def draft_config(table: dict[str, Any], origin: str, changes: Sequence[str] = ()) -> ConfigDraft:
    """As `parse_config`, with wrong settings as problems."""
    unknown = [*unknown_keys(Config, table)]
    problems = [f"{origin}: {each.text}" for each in unknown]
    replaced: list[str] = []
    for change in changes:
        try:
            apply_change(after := deepcopy(table), change)
            table = after
        except ValueError as error:
            problems.append(str(error))
            replaced.append(re.sub(r"\.\d+\b", "", change.partition("=")[0].strip()))
    texts = {each.text for each in unknown}
    unknown = [*unknown_keys(Config, table)]  # once more: a key that was probably meant may be set now
    problems += [f"--set: {each.text}" for each in unknown if each.text not in texts]
    changed = {change.partition("=")[0].strip() for change in changes}
    table = {"prompts": _DEFAULT_PROMPTS, **table}
    table = add_named_environments(table)
    run = table.get("run", {})
    if isinstance(run, dict) and isinstance(run.get("seed"), int) and run["seed"] in SEEDS:
        for section in ("prompts", "warm_start"):
            if isinstance(table.get(section), dict):
                table[section] = {"seed": run["seed"], **table[section]}
    incomplete = dict(table)
    for section, kind in _TASK_CLASSES.items():
        if isinstance(table.get(section), dict):
            table[section] = complete_tasks(table[section], kind)
    replaced += [each.meant for each in unknown if each.meant]
    part = valid_part(Config, table, replaced)
    problems += [_error_line(origin, error, changed) for error in without_inherited(part.errors, incomplete)]
    return ConfigDraft(part.value, origin, tuple(problems), part.replaced | _undecided(part.value, part.replaced))


def _undecided(config: Config, replaced: Collection[str]) -> frozenset[str]:
    """The settings that a run may need, or not, by what the user meant with the `replaced` ones."""
    found: tuple[str, ...] = ()
    if "rollout.engine" in replaced:
        found = ("rollout.replicas",) if config.model.path else ("rollout.replicas", "model")
    no_address = {"kafka.bootstrap_servers", "kafka.client_properties"} & {*replaced}
    return frozenset((*found, "kafka") if no_address else found)


def save_config(config: Config, file: Path) -> None:
    """Write `config` as TOML; `load_config` reads it back equal."""
    write_atomically(file, tomli_w.dumps(plain_table(config)))  # a kill must not leave a run that cannot resume


def plain_table(config: Config) -> dict[str, Any]:
    """`config` as the table of a TOML file."""
    return dict[str, Any](_without_none(adapter(Config).dump_python(config, mode="json")))


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

    return dict(leaves(plain_table(config), ""))


def _error_line(origin: str, problem: Mapping[str, Any], changed: Collection[str]) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    message, given = problem["msg"].removeprefix("Value error, "), problem.get("input")
    origin = "--set" if is_about_a_change(where, message, changed) else origin
    if problem["type"] in _OF_BOUNDS:
        section, _, name = re.sub(r"(\.\d+)+$", "", where).rpartition(".")  # without the number of an item
        return f"{origin}: {section}: {name} must be {requirement(problem.get('ctx', {'func': None}))}, not {given}"
    shown = "" if isinstance(given, dict | list) else f" (it is {given!r})"
    if problem["type"] == "literal_error" and isinstance(given, str):
        shown += suggest_name(given, re.findall(r"'([^']+)'", message), 0)
    return f"{origin}: {where}{': ' * bool(where)}{message}{shown}"


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
