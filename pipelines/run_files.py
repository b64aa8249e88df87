"""What a run has in Kafka for hosts that join it: the settings that rollouts and relays need, and the model's files.

Rank 0 of the trainer writes it. Paths of its machine and secrets are left out: only settings named here are written.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from infra.kafka.producer import DeliveryFailed
from infra.kafka.ranges import UnknownTopic
from infra.kafka.readiness import ClientError, retry_transient
from infra.kafka.run_files import write_run_files
from infra.listening import is_loopback
from infra.models.config_files import read_config_files
from infra.storage import open_storage
from pipelines.config import Config, plain_table
from pipelines.config_paths import script_of

SETTINGS_FILE = "settings.toml"
"""The name of the run's settings among its files in Kafka."""
NOT_HERE = "on-the-machine-of-the-run"
"""The folder in the paths of files that only the machine of the run has; the folder does not exist."""
_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "run": ("name", "seed", "time_scale"),
    "kafka": ("partitions", "replication_factor", "outage_timeout_s", "transaction_timeout_s", "metrics_hours"),
    "experience": ("shards", "max_shards"),
    "trainer": ("ranks", "batch_shares", "optimizer_steps"),
}
"""The settings of these sections by which all roles agree on topics and times."""
_OF_A_MACHINE = ("store", "relay", "advertise", "token_file", "certificate_file", "authority_file", "disk_folder")
"""The settings of section [relay] that each machine has of its own."""

log = logging.getLogger(__name__)


def settings_for_hosts(table: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in `table`, of a TOML file with all defaults, for rollouts and relays on other hosts.

    Such settings are returned as they are: what another program wrote to Kafka names no file here either. Raises
    ValueError, TypeError, KeyError or AttributeError for a table that is not one of a run.
    """
    found: dict[str, Any] = {
        section: {name: table[section][name] for name in names if name in table[section]}
        for section, names in _SETTINGS.items()
    }
    found |= {section: table[section] for section in ("progress", "placement")}
    found["rollout"] = _rollout(table["rollout"])
    found["relay"] = _relay(table["relay"])
    if (
        table["rollout"]["engine"] == "emulated"
    ):  # which has no tokenizer; whether its trainer is, too, decides on its shares
        found["prompts"] = {"source": "synthetic"}
        found["trainer"]["learner"] = {"name": _elsewhere(table["trainer"]["learner"]["name"])}
    return found


def publish_run_files(config: Config) -> None:
    """Write the settings and the model's files of the run to Kafka, if they have changed.

    The trainer can do without: an error is logged.
    """
    try:
        files = {SETTINGS_FILE: tomli_w.dumps(settings_for_hosts(plain_table(config))).encode()}
        if not config.emulated:
            files |= read_config_files(config.model_folder())
        client = config.kafka.client()
        if retry_transient(lambda: write_run_files(client, config.run.name, files)):
            log.info("wrote %s for hosts that join", ", ".join(files))
    except (ClientError, DeliveryFailed, UnknownTopic, TimeoutError, OSError, ValueError) as error:
        log.warning("hosts cannot join this run by Kafka's address, or get what an earlier start wrote: %s", error)


def _rollout(table: dict[str, Any]) -> dict[str, Any]:
    environments = [each | {"name": _elsewhere(each["name"])} for each in table.get("environments", ())]
    emulation = dict(table["emulation"])
    if (lengths := emulation["lengths"]).get("file"):
        emulation["lengths"] = lengths | {"file": f"{NOT_HERE}/{Path(lengths['file']).name}"}
    vllm = {name: value for name, value in table.get("vllm", {}).items() if name != "hf_token"}
    return table | {"environments": environments, "emulation": emulation, "vllm": vllm}


def _relay(table: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in table.items() if name not in _OF_A_MACHINE}
    if not is_loopback(found["listen"]):
        found["listen"] = "0.0.0.0"
    if isinstance(open_storage(found.get("object_store", "")), Path):
        found.pop("object_store", None)
    return found


def _elsewhere(target: str) -> str:
    script = script_of(target)
    return f"{NOT_HERE}/{Path(script).name}:{target.rpartition(':')[2]}" if script else target
