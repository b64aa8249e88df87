"""Whether a configuration can be deployed. Checked first: it needs none of the libraries that compute the memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from infra.deploy.plan import SECRETS, resource_prefix
from infra.kafka.properties import parse_servers
from infra.listening import is_loopback
from infra.storage import open_storage
from operators.gateway.config import GatewayConfig
from operators.relay.config import RelayConfig
from pipelines.config import Config, ConfigDraft, ConfigProblems
from pipelines.roles import roles_of
from pipelines.run.paths import files_read
from pipelines.run.preflight import unknown_environments
from pipelines.run.run_names import UNNAMED

FIRST_PORT = 1024
"""The first port that a process without rights may listen at."""
_RUN_NAME = re.compile("[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_NAME, _NAME_OF_STATEFUL_SET, _NAME_OF_FLINK = 63, 52, 45
"""Longest names: of a Service or Job; of a StatefulSet, whose pods have it and a hash in a label; of a Flink."""
_IN_SECRETS = ("kafka.", "relay.", "gateway.")
"""Sections whose files are in Secrets."""


def check_deployable(draft: ConfigDraft, file: Path) -> None:
    """Raise ConfigProblems if `draft`, read from `file`, cannot be deployed, with all problems."""
    if problems := draft.problems_and(deployment_problems(draft.config)):
        raise ConfigProblems(problems, f"{file} cannot be deployed")


def deployment_problems(config: Config) -> list[str]:
    """Why the configuration cannot be deployed, each with the setting to change."""
    found = [*_name(config)] if config.run.name else [UNNAMED]
    found += _agents(config)
    if config.autoscaling is not None and config.autoscaling.actuator == "local":
        found.append("autoscaling.actuator is 'local': in a cluster set 'kubernetes', or a command")
    found += _flink(config)
    found += _brokers(config.kafka.bootstrap_servers)
    for key in ("memory_gib", "cpus"):
        roles = dict.fromkeys(role.pipeline for role in roles_of(config))
        for role in sorted(getattr(config.deploy, key).keys() - roles.keys()):
            found.append(f"deploy.{key} has {role!r}, which is no role of this run: {', '.join(roles)}")
    found += unknown_environments(config)
    found += _outside_volume(config)
    found += _rank_0(config)
    if not config.emulated and is_loopback(config.relay.listen):
        found.append(_loopback_relay(config.relay))
    for key, gpus in (("trainer.gpus", config.trainer.gpus), ("rollout.gpus", config.rollout.gpus)):
        if gpus:
            found.append(f"{key} is {list(gpus)}: a container sees only its own GPUs; remove the setting")
    secrets = {
        "kafka.client_properties": config.kafka.client_properties,
        "relay.token_file": config.relay.token_file,
        "relay.certificate_file": config.relay.certificate_file,
        "relay.authority_file": config.relay.authority_file,
    }
    if config.gateway is not None:
        names = ("secret_file", "certificate_file", "key_file")
        secrets |= {f"gateway.{name}": getattr(config.gateway, name) for name in names}
    for key, path in secrets.items():
        if path and not is_secret(path):
            found.append(f"{key} is {path!r}, but must be in {SECRETS}, where the Secrets are mounted")
    if (name := PurePosixPath(config.kafka.client_properties).name) not in ("", "{role}.properties"):
        found.append(f"kafka.client_properties names {name}, but must name {{role}}.properties: each role has a Secret")
    return found


def _brokers(servers: str) -> Iterator[str]:
    if not servers:
        yield "kafka.bootstrap_servers is not set: name the brokers as pods reach them"
        return
    try:
        parse_servers(servers)
    except ValueError as error:
        yield f"kafka.bootstrap_servers is {servers!r}: {error}"


def _name(config: Config) -> Iterator[str]:
    """That the run's name, which is part of names and labels in the cluster, is invalid there or too long."""
    roles = {role.pipeline: _NAME_OF_STATEFUL_SET for role in roles_of(config)}
    longest = {**roles, "topics-01234567": _NAME, **({"flink": _NAME_OF_FLINK} if config.deploy.flink_slots else {})}
    room = {f"{resource_prefix('')}-NAME-{each}": limit for each, limit in longest.items()}
    resource, limit = min(room.items(), key=lambda each: each[1] - len(each[0]))
    characters = limit - len(resource) + len("NAME")
    if _RUN_NAME.fullmatch(config.run.name) is None or len(config.run.name) > characters:
        yield (
            f"run.name is {config.run.name!r}: a deployed run has at most {characters} lower-case letters, digits and "
            f"'-', the first and last no '-' ({resource} may have {limit} characters)"
        )


def ranks_of_container(config: Config) -> int:
    """Ranks on the GPUs of one machine are processes of one container: only then can the GPUs exchange directly.

    As many as fit, the same number in each container.
    """
    if config.emulated or not config.trainer.device.startswith("cuda"):
        return 1
    ranks = config.trainer.ranks
    return max(each for each in range(1, min(ranks, config.deploy.gpus_per_machine) + 1) if ranks % each == 0)


def _rank_0(config: Config) -> Iterator[str]:
    """That ranks in several containers could not find rank 0."""
    if config.trainer.ranks > ranks_of_container(config) and is_loopback(config.trainer.rank_0_host):
        name = f"{resource_prefix(config.run.name)}-trainer"
        yield (
            f"trainer.rank_0_host is {config.trainer.rank_0_host}, where ranks of other containers do not reach rank "
            f"0: set {name}-0.{name}"
        )


def _loopback_relay(relay: RelayConfig) -> str:
    """What to set in [relay] at once: an address of a machine needs the token and the certificates, too."""
    files = {"token_file": "relay-token", "certificate_file": "relay.pem", "authority_file": "ca.pem"}
    needed = {"listen": "0.0.0.0"}
    for key, name in files.items():
        if not getattr(relay, key) and not (relay.clear_text and key != "token_file"):
            needed[key] = f"{SECRETS}/{name}"
    listed = ", ".join(f'{key} = "{value}"' for key, value in needed.items())
    return f"relay.listen is {relay.listen}, where relays of other machines cannot connect: set in [relay] {listed}"


def _flink(config: Config) -> Iterator[str]:
    """What a session cluster of Flink lacks for the job of the data plane."""
    slots, shards = config.deploy.flink_slots, max(config.score.shards, config.experience.shards)
    if not slots:
        return
    if slots < shards:
        yield f"deploy.flink_slots is {slots}, but score.shards and experience.shards need {shards}: set {shards}"
    if config.autoscaling is not None and config.autoscaling.actuator == "kubernetes":
        yield (
            "autoscaling.actuator is 'kubernetes', but with deploy.flink_slots the autoscaler runs beside verifiers, "
            "without a service account: set a command"
        )


def is_secret(path: str) -> bool:
    """Whether the file `path` is one of the Secrets that are mounted."""
    return str(PurePosixPath(path).parent) == SECRETS


def _agents(config: Config) -> Iterator[str]:
    """What gateway and agents lack to run in containers: they share no folder, and write to none."""
    if not config.has_gateway:
        return
    gateway, agents = config.gateway or GatewayConfig(), config.agents
    if is_loopback(gateway.host):
        yield f'gateway.host is {gateway.host}: with "0.0.0.0", certificate_file and key_file agents can connect'
    if gateway.port < FIRST_PORT:
        yield f"gateway.port is {gateway.port}: set one from {FIRST_PORT} on, such as 8443, for its Service"
    if not gateway.secret_file:
        yield f"gateway.secret_file is not set: name a file in {SECRETS}, which gateway and agents read"
    if gateway.serve_requests:
        yield f"gateway.serve_requests is {gateway.serve_requests}: deployed gateways answer agents alone; set 0"
    if agents is None or not agents.runs_here:
        return
    if agents.transcripts:
        yield "agents.transcripts is true, but pods of agents cannot write to the volume: set false"
    for word in agents.command:
        if not PurePosixPath(word).is_absolute() and (word.endswith(".py") or Path(word).is_file()):
            place = PurePosixPath(config.deploy.volume_path) / PurePosixPath(word).name
            yield f"agents.command names {word!r}: copy it to the volume, and set the path {place}"


def volume_files(config: Config) -> list[tuple[str, str]]:
    """The model and the files that the roles read from the volume, each with its setting."""
    model = [] if config.emulated else [("model.path", config.model.path)]
    files = [(key, str(path)) for key, path in files_read(config) if not key.startswith(_IN_SECRETS)]
    return list(dict.fromkeys([*model, *files]))


def _outside_volume(config: Config) -> Iterator[str]:
    volume = PurePosixPath(config.deploy.volume_path)
    written = [("run.folder", str(config.run.folder))]
    shared = (
        ("trainer.checkpoint_folder", config.trainer.checkpoint_folder),
        ("relay.object_store", config.relay.object_store),
    )
    stored = ((key, open_storage(place)) for key, place in shared if place)
    written += [(key, str(place)) for key, place in stored if isinstance(place, Path)]
    for key, path in (*written, *volume_files(config)):
        if volume not in (PurePosixPath(path), *PurePosixPath(path).parents):
            place = f"must be below deploy.volume_path ({volume}), which all containers mount"
            copy = (
                ""
                if (key, path) in written
                else f": copy it there, and set the path {volume / PurePosixPath(path).name}"
            )
            yield f"{key} is {path!r}, but {place}{copy}"
