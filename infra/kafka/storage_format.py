"""Formats the data folder of a new broker without a JVM, in milliseconds.

Kafka's own `StorageTool format` takes a third of the CPU time of a broker's start. What it writes for a cluster without
users is the same for every broker of a Kafka release, but for the ids in `meta.properties`: the other file,
`bootstrap.checkpoint`, has the feature levels with which a cluster of this release begins. `python -m infra.jars`
stores it in `infra/jars`.
"""

from __future__ import annotations

import base64
import uuid
from pathlib import Path

from infra.files import sync_path, write_durably
from infra.kafka.broker_jars import KAFKA_VERSION

META_PROPERTIES = "meta.properties"
"""Its presence marks a formatted folder."""
BOOTSTRAP_CHECKPOINT = "bootstrap.checkpoint"
CHECKPOINT_FILE = Path(__file__).parents[1] / "jars" / f"kafka-{KAFKA_VERSION}.checkpoint"


def random_id() -> str:
    """A new id of a cluster or a folder: 16 bytes in URL-safe base64, without padding.

    It begins with a letter: one that begins with "-" would be parsed as an option by Kafka's tools.
    """
    return "L" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")[1:]


def format_storage(log_dir: Path, node_id: str, cluster_id: str) -> None:
    """Make `log_dir` the empty log folder of broker `node_id` of the new cluster `cluster_id`.

    `meta.properties` is written last, so that a folder that was left by a kill is formatted again.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    checkpoint = log_dir / BOOTSTRAP_CHECKPOINT
    checkpoint.write_bytes(CHECKPOINT_FILE.read_bytes())
    sync_path(checkpoint)
    entries = {"version": "1", "cluster.id": cluster_id, "node.id": node_id, "directory.id": random_id()}
    write_durably(log_dir / META_PROPERTIES, "".join(f"{name}={value}\n" for name, value in entries.items()))
