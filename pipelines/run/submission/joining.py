"""The configuration of a role that joins a run by Kafka's address: CONFIG is `kafka://HOST:PORT[,HOST:PORT…]/RUN`.

The run's settings and its model's small files are read from Kafka; paths and secrets are this host's own, by `--set`.
"""

from __future__ import annotations

import re
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from infra.deploy.role_acls import JOINING
from infra.kafka.admin import admin_client, list_topics
from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import UnknownTopic
from infra.kafka.readiness import retry_transient, wait_for_brokers
from infra.kafka.run_files import InvalidRunFiles, read_run_files
from infra.models.config_files import NAMES, write_without_weights
from infra.name_lookup import suggest_name
from pipelines.config import Config, ConfigDraft, ConfigError, draft_config, parse_config
from pipelines.config_paths import script_of
from pipelines.inspect.run_folders import laminar_command
from pipelines.run.run_kafka import WAIT_S
from pipelines.run.state import link_latest
from pipelines.run_files import NOT_HERE, SETTINGS_FILE, settings_for_hosts
from schemas.topics import PREFIX, RUN_FILES, run_of

FORM = "kafka://HOST:PORT[,HOST:PORT…]/RUN"
_ADDRESS = re.compile(r"kafka://((?:[^\s/,@]+:\d{1,5})(?:,[^\s/,@]+:\d{1,5})*)/([A-Za-z0-9_-]{1,100})")
RETRY_S = 1.0
MAX_SETTINGS_BYTES = 1 << 20


class NotWritten(RuntimeError):
    """The run has not written its files yet: its trainer has not started."""


@dataclass(frozen=True)
class RunAddress:
    """A run by Kafka's address."""

    servers: str
    run: str

    @classmethod
    def of(cls, text: str) -> RunAddress | None:
        """The address in `text`; None if it is the name of a file. Raises ConfigError for an invalid address."""
        if not text.startswith("kafka:"):
            return None
        found = _ADDRESS.fullmatch(text)
        if found is None:
            hint = "; name a file with the password by --set kafka.client_properties=FILE" if "@" in text else ""
            raise ConfigError(f"{text!r} is not an address of a run, {FORM}{hint}")
        return cls(found[1], found[2])

    def __str__(self) -> str:
        return f"kafka://{self.servers}/{self.run}"


def join_run(
    address: RunAddress, pipeline: str, changes: Sequence[str], note: Callable[[str], None] = lambda line: None
) -> ConfigDraft:
    """The configuration of `pipeline` of the run at `address`, with `changes` ("section.key=value").

    A rollout's model folder is made in the run's folder on this host. `note` receives one-line messages. Raises
    ConfigError for an unknown run, one without these files, and settings that this host must have of its own;
    NotWritten, BrokerUnreachable, OSError.
    """
    if pipeline not in JOINING:
        raise ConfigError(f"{pipeline} cannot join by Kafka's address, only {' and '.join(JOINING)}: name a file")
    given = {"bootstrap_servers": address.servers}
    of_kafka = [change for change in changes if change.strip().startswith("kafka.")]
    kafka = parse_config({"kafka": given}, str(address), of_kafka).kafka.for_role(pipeline)
    try:
        client = kafka.client()
    except (OSError, ValueError) as error:
        raise ConfigError(f"kafka.client_properties: {error}") from error
    wait_for_brokers(client, WAIT_S, lambda _, line: note(line), setting="the address")
    table = _settings(address, _files(client, address, lambda name: name == SETTINGS_FILE, note))
    table["kafka"] |= given
    draft = draft_config(table, str(address), changes)
    _refuse_missing(draft.config, pipeline, address, changes)
    config = draft.config
    if pipeline != "rollout" or config.emulated or config.model.path or "model.path" in draft.replaced:
        return draft
    if config.rollout.engine == "vllm":
        raise ConfigError(
            "rollout.engine is 'vllm', which begins with the weights of a model folder: copy the run's model to this "
            "host, and name it by --set model.path=FOLDER"
        )
    table["model"] = {"path": str(_model_folder(config, _files(client, address, NAMES.__contains__, note)))}
    return draft_config(table, str(address), changes)


def _files(
    client: ClientProperties, address: RunAddress, wanted: Callable[[str], bool], note: Callable[[str], None]
) -> dict[str, bytes]:
    """The run's files of `wanted` names, once they are written."""
    deadline, noted = time.monotonic() + WAIT_S, False
    while True:
        try:
            found = retry_transient(lambda: read_run_files(client, address.run, wanted))
        except UnknownTopic:
            raise ConfigError(_unknown(client, address)) from None
        except InvalidRunFiles as error:
            raise ConfigError(f"{address}: {error}") from error
        if found is not None:
            return found
        if time.monotonic() > deadline:
            raise NotWritten(f"{address}: rank 0 of the trainer has not written the run's settings: is it running?")
        if not noted:
            note(
                f"waiting for rank 0 of the trainer of run {address.run}, which writes the run's settings at its start"
            )
            noted = True
        time.sleep(RETRY_S)


def _unknown(client: ClientProperties, address: RunAddress) -> str:
    """Why there is no topic of files."""
    with admin_client(client) as admin:
        runs = {run for topic in retry_transient(lambda: list_topics(admin, f"{PREFIX}.")) if (run := run_of(topic))}
    if address.run in runs:
        return (
            f"run {address.run} has no topic {RUN_FILES.name(address.run)}: it was started by an older release. Resume "
            "or submit its trainer with this one, or name a file with the run's settings instead of the address"
        )
    hint = suggest_name(address.run, runs, 8) if runs else f"; `{laminar_command()} runs list` shows those of a machine"
    return f"there is no run {address.run!r} at {address.servers}{hint}"


def _settings(address: RunAddress, files: dict[str, bytes]) -> dict[str, Any]:
    """The run's settings, as the table of a TOML file."""
    try:
        if len(text := files[SETTINGS_FILE]) > MAX_SETTINGS_BYTES:
            raise ValueError(f"{len(text)} bytes are over the limit of {MAX_SETTINGS_BYTES}")
        table = settings_for_hosts(tomllib.loads(text.decode()))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{address}: the run's settings in Kafka are not valid: {error!r}") from error
    if table["run"].get("name") != address.run:
        raise ConfigError(f"{address}: the settings in Kafka are not of run {address.run}")
    return table


def _refuse_missing(config: Config, pipeline: str, address: RunAddress, changes: Sequence[str]) -> None:
    """Raise ConfigError for a file of the run's own machine, and a secret, that `pipeline` needs here."""
    missing = list[str]()
    if not config.emulated and not any(change.strip().startswith("relay.token_file") for change in changes):
        missing.append(
            "relay.token_file is not set: copy the token of the run's relays to this host (its relay.token_file, or "
            f"runs/{address.run}/relay.secret on its machine), and add --set relay.token_file=FILE"
        )
    if pipeline == "rollout":
        named = {f"rollout.environments.{at}.name": each.name for at, each in enumerate(config.rollout.environments)}
        scripts = {key: (script_of(name), name) for key, name in named.items() if script_of(name)}
        lengths = config.rollout.emulation.lengths.file
        for key, (file, name) in (scripts | {"rollout.emulation.lengths.file": (lengths, lengths)}).items():
            if Path(file).parts[:1] == (NOT_HERE,):
                own = name.removeprefix(f"{NOT_HERE}/")
                missing.append(f"{key} is {own}, a file of the run's machine: copy it here, and add --set {key}={own}")
    if missing:
        raise ConfigError("; ".join(missing))


def _model_folder(config: Config, files: dict[str, bytes]) -> Path:
    """The folder with `files`, of the run's model, in the run's folder on this host."""
    digest = blake3(b"".join(name.encode() + b"\0" + blake3(data).digest() for name, data in sorted(files.items())))
    folder = config.run_folder.absolute() / f"model-{digest.hexdigest()[:16]}"
    is_new_run = not config.run_folder.exists()
    try:
        write_without_weights(folder, files)
    except ValueError as error:
        raise ConfigError(f"model.path: {error}") from error
    if is_new_run:
        link_latest(config.run_folder)
    return folder
