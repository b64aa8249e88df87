"""A local broker that outlives the command that started it: `laminar broker start`, `status` and `stop`.

Its data, its log and broker.json, by which the other commands find it, are in one folder.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from infra.kafka.broker import Broker, BrokerConfig, BrokerStartError, port_is_free, running_broker, start_broker
from infra.maven import PrintProgress
from infra.processes import stop_process


@dataclass(frozen=True)
class BrokerStatus:
    """A running local broker. `started_at` is in seconds since the epoch."""

    pid: int
    bootstrap_servers: str
    data_dir: Path
    log_file: Path
    started_at: float
    secure: bool = False


def start_detached(
    state_dir: Path, config: BrokerConfig | None = None, progress: PrintProgress = lambda message: None
) -> BrokerStatus:
    """Start a broker whose data is in `state_dir` and leave it running; return the one that already runs there.

    This function sets the data folder and the lifetime in `config`. Port 0 is the last port of this folder's broker if
    it is free, so that stored addresses stay valid. Raises what `start_broker` raises, and BrokerStartError if a broker
    already runs on another port than the requested one.
    """
    if (running := detached_status(state_dir)) is not None:
        if config is not None and config.port not in (0, int(running.bootstrap_servers.rpartition(":")[2])):
            where = running.bootstrap_servers
            raise BrokerStartError(f"a broker on {state_dir} already runs at {where}; stop it first")
        return running
    wanted = replace(config or BrokerConfig(state_dir), data_dir=state_dir, die_with_parent=False)
    if not wanted.secure and wanted.security.folder.exists():
        raise BrokerStartError(
            f"the broker on {state_dir} was created with --secure: start it with --secure, or use another folder"
        )
    if wanted.secure and (state_dir / "log").exists() and not wanted.security.folder.exists():
        raise BrokerStartError(f"the broker on {state_dir} was created without --secure: use another folder")
    if wanted.port == 0:
        wanted = replace(wanted, port=last_port(state_dir))
    start_broker(wanted, progress)
    status = detached_status(state_dir)
    if status is None:
        raise RuntimeError(f"the broker in {state_dir} ended right after its start; see {Broker(wanted).log_file}")
    return status


def detached_status(state_dir: Path) -> BrokerStatus | None:
    """Return the broker that runs on a folder, or None."""
    process = running_broker(state_dir)
    if process is None:
        return None
    state = json.loads((state_dir / "broker.json").read_text())
    return BrokerStatus(
        pid=process.pid,
        bootstrap_servers=state["bootstrap_servers"],
        data_dir=state_dir,
        log_file=state_dir / "broker.log",
        started_at=process.create_time(),
        secure="SASL_SSL:" in (state_dir / "server.properties").read_text(),
    )


def stop_detached(state_dir: Path) -> bool:
    """Stop the broker that runs on a folder; kill it after 10 seconds. Returns whether there was one."""
    process = running_broker(state_dir)
    if process is None:
        return False
    stop_process(process, 10.0)
    return True


def last_port(state_dir: Path) -> int:
    """The last port of a folder's broker if it is free, else 0."""
    try:
        state = json.loads((state_dir / "broker.json").read_text())
        port = int(str(state["bootstrap_servers"]).rpartition(":")[2])
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # none, or damaged by a crash of the machine
        return 0
    return port if port_is_free(port) else 0
