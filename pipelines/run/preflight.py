"""Checks of a configuration and of this machine (disk, memory, ports, GPUs) before anything is started."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from infra.files import access_error
from infra.listening import is_unspecified, port_problem
from infra.machine import GATEWAY_URL
from infra.models.config_files import is_without_weights
from infra.models.demo_config import PHRASES
from infra.models.sizes import adapter_parameters, parameter_count, unsupported_features
from infra.sizes import size_text
from infra.storage import open_storage, probe_writable
from operators.gateway.config import GatewayConfig
from operators.rollout.config import RolloutConfig
from operators.rollout.vllm_options import argument_names, reject_on_cpu, reject_unknown
from operators.trainer.config import BUILT_IN_LEARNER, WITH_CRITIC
from operators.trainer.training_config import TrainingConfig
from pipelines.config import Config, ConfigError
from pipelines.distribution import install_extra
from pipelines.inspect.run_folders import laminar_command
from pipelines.present.report.trackers import PACKAGES
from pipelines.roles import Role
from pipelines.run.learnability import unlearnable
from pipelines.run.paths import files_read
from pipelines.shards import store_folder
from schemas.records.agents import AGENT

MODEL_PARTS = {
    "config": ("config.json",),
    "weights": ("model.safetensors", "model.safetensors.index.json"),
    "tokenizer": ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"),
}
"""Files that a model folder must have, one of each kind; checked before torch is imported."""


def missing_requirements(config: Config, *, warm_start: bool = True, new: bool = True) -> Iterator[str]:
    """All reasons why `config` cannot run. With `warm_start`, a missing model may be created; see `host_problems`."""
    if config.emulated:
        yield from _emulation(config)
    elif config.model.path or not warm_start:
        yield from model_problems(config)
    elif config.warm_start is None:
        yield "model.path is not set: name a Hugging Face folder, or give a [warm_start] section"
    warm = config.warm_start if warm_start and not config.model.path else None
    if warm and all(task.task != warm.model.task for task in config.prompts.mixture):
        yield f"warm_start.model.task is {warm.model.task!r}, but no task of [prompts] is"
    if warm and warm.model.task not in PHRASES:
        yield (
            f"warm_start: there are no worked answers for task {warm.model.task!r}, only for "
            f"{', '.join(sorted(PHRASES))}; set model.path to a model of your own, which needs no warm start"
        )
    yield from _missing_template(config)
    yield from unknown_environments(config)
    missing = {key: path for key, path in files_read(config) if not os.path.exists(path)}
    yield from (missing_file(key, path) for key, path in missing.items())
    yield from _secrets(config, missing)
    for tracker in config.run.trackers:
        if importlib.util.find_spec(PACKAGES[tracker]) is None:
            yield f"run.trackers: {PACKAGES[tracker]} is not installed: {install_extra(tracker)}"
    if config.rollout.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        yield f"rollout.engine is 'vllm', which is not installed: {install_extra('vllm')}"
    if config.agents is not None and config.agents.function and importlib.util.find_spec("openai") is None:
        yield f"agents.function needs the package openai, which is not installed: {install_extra('agents')}"
    if config.agents is not None and config.agents.command and shutil.which(config.agents.command[0]) is None:
        yield f"agents.command: there is no program {config.agents.command[0]!r}"
    scaling = config.autoscaling
    if scaling is not None and scaling.actuator == "command" and shutil.which(scaling.command[0]) is None:
        yield f"autoscaling.command: there is no program {scaling.command[0]!r}"
    if config.rollout.total_replicas > config.placement.max_replicas:
        yield (
            f"rollout.processes × rollout.replicas = {config.rollout.total_replicas} replicas, "
            f"but placement.max_replicas is {config.placement.max_replicas}"
        )
    yield from host_problems(config, new=new)
    yield from unlearnable(config)
    unit = max(task.samples_per_prompt for task in config.prompts.mixture)
    if unit > config.admitted:
        yield (
            f"prompts.samples_per_prompt = {unit} is more than the limit of outstanding trajectories, "
            f"{config.admitted} (see placement.admitted_batches)"
        )


def missing_file(key: str, path: Path) -> str:
    """That the file `path` of `key` does not exist, and which one of the same name the working directory has; or why
    this user cannot know."""
    if denied := access_error(path):
        return f"{key}: {path} cannot be read ({denied})"
    ends = (Path(*path.parts[at:]) for at in range(1, len(path.parts)))
    here = next((end for end in ends if os.path.exists(end)), None) if path.is_absolute() else None
    hint = "" if here is None else f"; {here} is in the working directory, but paths in a configuration file are "
    return f"{key}: {path} does not exist{hint}{'relative to that file' if hint else ''}"


def unknown_environments(config: Config) -> Iterator[str]:
    """The environments that prompts name and the run does not have."""
    names = dict.fromkeys(task.environment for task in config.prompts.mixture if task.environment != AGENT)
    found = (config.rollout.environment_problem(name) for name in names)
    yield from (f"prompts.environment: {problem}" for problem in found if problem is not None)


def _secrets(config: Config, missing: Collection[str]) -> Iterator[str]:
    """Kafka login and relay token, as far as they can be checked without a connection; not those of missing files."""
    try:
        given = config.kafka.bootstrap_servers or config.kafka.client_properties
        if given and "kafka.client_properties" not in missing:
            config.kafka.client().admin()
    except (ValueError, OSError) as error:
        yield f"kafka: {error}"
    try:
        if "relay.token_file" not in missing:
            config.relay.token()
    except ValueError as error:
        yield f"relay: {error}"


def _emulation(config: Config) -> Iterator[str]:
    if any(task.source != "synthetic" for task in config.prompts.mixture):
        yield "rollout.engine is 'emulated', which has no tokenizer: set prompts.source = 'synthetic'"
    if config.model.path or config.warm_start is not None:
        yield "rollout.engine is 'emulated', which has no model: remove model.path and [warm_start]"


def model_problems(config: Config) -> Iterator[str]:
    """What the folder of model.path lacks."""
    try:
        folder: Path = config.model_folder()
    except ConfigError as error:
        yield str(error)
        return
    if denied := access_error(folder / "config.json"):
        yield f"model.path: {folder} cannot be read ({denied})"
        return
    for what, names in MODEL_PARTS.items():
        if what == "weights" and is_without_weights(folder):
            continue
        if not any((folder / name).is_file() for name in names):
            yield f"model.path: {folder} has no {what} (none of {', '.join(names)})"
    own_learner = config.trainer.learner.name != BUILT_IN_LEARNER  # which has its own limits
    if not own_learner and (features := unsupported_features(folder)) is not None:
        yield f"model.path: {folder} cannot be trained, because its config.json has {features}: take another model"


def _missing_template(config: Config) -> Iterator[str]:
    """That gateway.template is chat, and the model has no chat template."""
    if config.gateway is None or config.gateway.template != "chat" or config.emulated:
        return
    folder = Path(config.model.path)
    if not config.model.path and config.warm_start is not None:
        yield "gateway.template is 'chat', but the model of [warm_start] has no chat template: use 'plain' or 'auto'"
    elif config.model.path and os.path.isdir(folder) and not _has_chat_template(folder):
        yield f"gateway.template is 'chat', but {folder} has no chat template: add chat_template.jinja, or use 'plain'"


def _has_chat_template(folder: Path) -> bool:
    with suppress(OSError, ValueError):
        if (own := folder / "chat_template.jinja").is_file():  # it replaces that of tokenizer_config.json
            return bool(own.read_bytes())
        settings = json.loads((folder / "tokenizer_config.json").read_bytes())
        return isinstance(settings, dict) and bool(settings.get("chat_template"))
    return False


STATE_BYTES = 12
"""Of a checkpoint, per parameter: weights and two moments in float32."""
MIN_VERSIONS = 2
"""A store needs room for the version in use and the one that arrives."""


def host_problems(config: Config, *, new: bool) -> Iterator[str]:
    """What this machine lacks for `config`; a run that is not `new` has written its checkpoints already."""
    key, checkpoints = "run.folder", str(config.run_folder)
    unwritable = _unwritable(key, config.run_folder)
    if unwritable is not None:
        yield unwritable
    if config.trainer.checkpoint_folder:
        key, checkpoints = "trainer.checkpoint_folder", config.trainer.checkpoint_folder
        unwritable = _unwritable_storage(key, checkpoints, config.run.name)
        if unwritable is not None:
            yield unwritable
    folder = open_storage(checkpoints)
    if isinstance(folder, Path) and unwritable is None and (trained := _trained_parameters(config)):
        kept = config.trainer.checkpoints_kept + 1 if new else 1
        advice = "free some space, or lower trainer.checkpoints_kept"
        what = f"{kept} checkpoints of {trained} trained parameters"
        yield from _room(key, folder, kept * trained * STATE_BYTES, what, advice)
    objects = config.relay.object_store
    if objects and (problem := _unwritable_storage("relay.object_store", objects, config.run.name)) is not None:
        yield problem
    yield from store_problems(config)


def port_problems(config: Config, sections: Iterable[str] = ("relay", "gateway")) -> Iterator[str]:
    """The configured ports of `sections` that no process can listen at, on this machine and while no role runs."""
    gateway = config.gateway or GatewayConfig()
    relay = config.relay
    same_host = relay.listen == gateway.host or not {relay.listen, gateway.host}.isdisjoint(("0.0.0.0", "::"))
    if (
        config.gateway
        and {*sections} >= {"relay", "gateway"}
        and relay.port
        and relay.port == gateway.port
        and same_host
    ):
        yield f"gateway.port and relay.port are both {relay.port}: the roles of one machine need two ports"
    for key, host, port in (("relay", relay.listen, relay.port), ("gateway", gateway.host, gateway.port)):
        if key in sections and port and (reason := port_problem(host, port)):
            yield f"{key}.port: {host}:{port} cannot be used: {reason}"


def gateway_host_problems(config: Config) -> Iterator[str]:
    """That this run's agents get an address which stands for all of a machine: no certificate has it."""
    gateway, agents = config.gateway, config.agents
    if gateway is None or agents is None or not agents.runs_here or GATEWAY_URL in os.environ:
        return
    if is_unspecified(gateway.host) and not gateway.advertise:
        yield (
            f"gateway.host is {gateway.host}, to which no agent of this run can connect: set gateway.advertise to the "
            f"host name in {gateway.certificate_file}"
        )


def store_problems(config: Config) -> Iterator[str]:
    """That this machine's weight store has too little space for the model; what it holds already counts as space."""
    if parameters := _parameters(config):
        weight_bytes = 4 if config.rollout.weights_dtype == "float32" else 2
        store, needed = store_folder(config), MIN_VERSIONS * parameters * weight_bytes
        held = sum(file.stat().st_size for file in store.glob("*") if file.is_file()) if os.path.isdir(store) else 0
        advice = f"free some space (`{laminar_command()} doctor --clean`), or set relay.store to a larger place"
        what = f"{MIN_VERSIONS} weight versions of {parameters} parameters"
        yield from _room("relay.store", store, needed, what, advice, held)


def _parameters(config: Config) -> int:
    """The parameters of the model; 0 if it is emulated, does not exist yet, or is not on this machine."""
    folder = Path(config.model.path)
    return parameter_count(folder) if config.model.path and not config.emulated and os.path.isdir(folder) else 0


def _trained_parameters(config: Config) -> int:
    """The parameters in a checkpoint, about: those of the adapters or the whole policy, and of a critic."""
    parameters, learner = _parameters(config), config.trainer.learner
    adapters = adapter_parameters(Path(config.model.path), learner.lora.rank) if learner.lora.rank else parameters
    critic = parameters if learner.algorithm.name in WITH_CRITIC else 0
    return min(adapters, parameters) + critic


def _existing(folder: Path) -> Path:
    """`folder`, or its nearest parent that exists and that this user can see."""
    return next(each for each in (folder, *folder.absolute().parents) if os.path.isdir(each))


def _unwritable(key: str, folder: Path) -> str | None:
    """Why no file can be written into `folder`, which need not exist yet; None if one can."""
    if denied := access_error(folder):
        return f"{key}: {folder} cannot be written ({denied}): set another {key}"
    place = _existing(folder)
    if (file := next((each for each in (folder, *folder.parents) if os.path.isfile(each)), None)) is not None:
        return f"{key}: {file} is a file: set another {key}"
    try:
        with tempfile.TemporaryFile(dir=place):  # access rights alone do not tell: root has them in /proc, too
            return None
    except OSError as error:
        reason = error.strerror or str(error)
        return f"{key}: {folder} cannot be written: no file can be created in {place} ({reason}): set another {key}"


def _unwritable_storage(key: str, place: str, run: str) -> str | None:
    """As `_unwritable`, for the value of a setting that may be a URI, where each run has a folder of its own."""
    storage = open_storage(place)
    if isinstance(storage, Path):
        return _unwritable(key, storage)
    try:
        probe_writable(storage / run)
        return None
    except OSError as error:
        advice = f"create the bucket, give this user's credentials the right to write, or set another {key}"
        return f"{key}: {place} cannot be written: {error}: {advice}"


def _room(key: str, folder: Path, needed: int, what: str, advice: str, held: int = 0) -> Iterator[str]:
    """That `folder` has too little space for `needed` bytes, of which it has `held` already."""
    place = _existing(folder)
    free = shutil.disk_usage(place).free + held
    if free < needed:
        yield f"{key}: {place} has {size_text(free)} free, but {what} need {size_text(needed)}: {advice}"


def gpu_problems(config: Config, visible: Sequence[str]) -> Iterator[str]:
    """Reasons why the run cannot use the GPUs `visible` on this machine; none for an emulated run."""
    if config.emulated:
        return
    rollout, trainer = config.rollout, config.trainer
    yield from _vllm_problems(rollout, visible)
    try:
        taken = {gpu for process in range(rollout.processes) for gpu in rollout.gpus_of(process, visible)}
    except ValueError as error:
        yield str(error)
        return
    if not trainer.device.startswith("cuda"):
        return
    if (absent := _absent_gpu(trainer, range(trainer.ranks), visible)) is not None:
        yield absent
        return
    of_ranks = [_gpu_of_rank(trainer, rank, visible) for rank in range(trainer.ranks)]
    if (used := len(set(of_ranks))) < trainer.ranks:
        yield (
            f"trainer.ranks is {trainer.ranks}, but the trainer has {used} of this machine's GPUs, and ranks share "
            f"none: set trainer.ranks = {used} or name more trainer.gpus, or start ranks on other machines with "
            "`laminar submit trainer`"
        )
    shared = taken & {visible[gpu] for gpu in of_ranks}
    if shared and len(visible) > 1:  # a machine with one GPU has no other way
        yield (
            f"trainer and rollouts share GPU {', '.join(sorted(shared))}: give each its own with trainer.gpus and "
            "rollout.gpus, such as trainer.gpus = [0, 1, 2, 3] and rollout.gpus = [4, 5, 6, 7]"
        )


def absent_gpus(config: Config, role: Role, visible: Sequence[str]) -> Iterator[str]:
    """Reasons why `role`, if it is a trainer's rank or a rollout, lacks a GPU on a machine with the GPUs `visible`."""
    if config.emulated:
        return
    if role.pipeline == "rollout":
        yield from _vllm_problems(config.rollout, visible)
        try:
            config.rollout.gpus_of(role.index, visible)
        except ValueError as error:
            yield str(error)
    elif role.pipeline == "trainer" and (absent := _absent_gpu(config.trainer, [role.index], visible)) is not None:
        yield absent


def _vllm_problems(rollout: RolloutConfig, visible: Sequence[str]) -> Iterator[str]:
    """Why vLLM cannot have the options of `rollout` on a machine with the GPUs `visible`."""
    if rollout.engine == "vllm":
        try:
            reject_unknown(rollout.vllm, argument_names())
            if not visible:
                reject_on_cpu(rollout.vllm)
        except ValueError as error:
            yield str(error)


def shared_gpus(config: Config, role: Role, others: Iterable[Role], visible: Sequence[str]) -> Iterator[str]:
    """Reasons why `role`, a trainer's rank or a rollout, would share a GPU with one of the other kind, or with another
    rank, among `others`, which run on this machine with the GPUs `visible`."""
    if config.emulated:
        return
    for other in others:
        if other == role or not (shared := _gpus_of(config, role, visible) & _gpus_of(config, other, visible)):
            continue
        both = f"{role.name} and {other.name}, which runs on this machine, share GPU {', '.join(sorted(shared))}"
        if role.pipeline == other.pipeline == "trainer":
            yield f"{both}, and ranks share none: name more trainer.gpus, or start the rank on another machine"
        elif role.pipeline != other.pipeline and len(visible) > 1:  # a machine with one GPU has no other way
            yield f"{both}: give trainer and rollouts their own with trainer.gpus and rollout.gpus"


def _gpus_of(config: Config, role: Role, visible: Sequence[str]) -> frozenset[str]:
    """The GPUs of `visible` that `role` takes; none if it cannot, which it reports itself."""
    if role.pipeline == "rollout":
        with suppress(ValueError):
            return frozenset(config.rollout.gpus_of(role.index, visible))
    elif role.pipeline == "trainer" and config.trainer.device.startswith("cuda"):
        number = _gpu_of_rank(config.trainer, role.index, visible)
        return frozenset(visible[number : number + 1])
    return frozenset()


def _absent_gpu(trainer: TrainingConfig, ranks: Iterable[int], visible: Sequence[str]) -> str | None:
    """That one of `ranks` uses a GPU that is not among those `visible`."""
    if not trainer.device.startswith("cuda"):
        return None
    if not visible:
        return f"trainer.device = {trainer.device!r}, but this machine has no GPU: set trainer.device = 'cpu'"
    absent = [gpu for rank in ranks if (gpu := _gpu_of_rank(trainer, rank, visible)) >= len(visible)]
    if not absent:
        return None
    return f"the trainer uses GPU {min(absent)}, but this machine has {len(visible)} GPUs, numbered from 0"


def _gpu_of_rank(trainer: TrainingConfig, rank: int, visible: Sequence[str]) -> int:
    """The number, among those `visible` on its machine, of the GPU of `rank`."""
    return int(trainer.device_of(rank, visible).partition(":")[2] or 0)
