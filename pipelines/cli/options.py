"""Options that commands share: which run, which Kafka, and how the answer is printed."""

from __future__ import annotations

import atexit
import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.present.output import Form

if TYPE_CHECKING:
    from infra.kafka.properties import ClientProperties

RUNS = Path("runs")
WAIT_S = 5.0

RunOption = Annotated[
    str | None, typer.Option("--run", metavar="NAME", help="The run; by default the latest one under ./runs.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True)
class Connection:
    """A run, and how to reach the Kafka that holds it."""

    run: str
    client: ClientProperties


@dataclass(frozen=True)
class Printing:
    """The options that say how rows are printed."""

    output: Annotated[
        Form | None, typer.Option("--output", "-o", help="How rows are printed; otherwise as people read them.")
    ] = None
    json: JsonOption = False

    def form(self, otherwise: Form = "table", json: Form = "json") -> Form:
        """The form that is asked for; `json` is what --json stands for."""
        return self.output or (json if self.json else otherwise)


@dataclass(frozen=True)
class Brokers:
    """The options that say where Kafka is."""

    brokers: Annotated[
        str | None,
        typer.Option("--bootstrap-server", "-b", metavar="HOST:PORT", help="Kafka; by default where the run has it."),
    ] = None
    command_config: Annotated[
        Path | None,
        typer.Option("--command-config", "-F", metavar="FILE", help="Kafka client properties, as Java's tools have."),
    ] = None

    @property
    def given(self) -> bool:
        return bool(self.brokers or self.command_config)

    def client(self) -> ClientProperties:
        """The client properties that they give. Raises ValueError on a bad one, OSError for a missing file."""
        return properties_of(self.brokers, self.command_config)


@dataclass(frozen=True)
class Address(Brokers):
    """The options that say which run, and where its Kafka is."""

    run: RunOption = None

    def connect(self) -> Connection:
        """The run and its Kafka, a broker having answered. Raises as `connect` does."""
        return connect(self.run, self.brokers, self.command_config)


def connect(run: str | None, brokers: str | None, command_config: Path | None, runs: Path | None = None) -> Connection:
    """The run and Kafka that these options name, a broker having answered.

    Without `run` it is the latest under `runs` (./runs), or the only one on the brokers. Raises typer.BadParameter when
    the options do not say which, BrokerUnreachable when Kafka does not answer, ValueError on a bad property.
    """
    from infra.kafka.readiness import BrokerUnreachable, why_unreachable

    stated = {} if brokers or command_config else read_state(run, runs or RUNS)
    if stated.get("client_properties"):
        command_config = Path(stated["client_properties"])
    client = properties_of(brokers or stated.get("bootstrap_servers"), command_config)
    own = None if brokers or command_config else _own_log(run, runs or RUNS)
    if own is not None and not _port_answers(client.bootstrap_servers):
        client = _open_log(own)
    if (reason := why_unreachable(client.admin(), WAIT_S)) is not None:
        raise BrokerUnreachable(f"Kafka does not answer: {reason}. Is it running, and is the address right?")
    return Connection(run or stated.get("run") or _only_run(client), client)


def _own_log(run: str | None, runs: Path) -> Path | None:
    """The data of the broker that `laminar run` started for this run; None where it started none."""
    folder = runs / (run or "latest") / "kafka"
    return folder.resolve() if folder.is_dir() else None


def _open_log(data: Path) -> ClientProperties:
    """A run's log outlives its broker: start one on it again, for as long as this command lasts."""
    from infra.kafka.broker import BrokerConfig, start_broker
    from infra.kafka.properties import ClientProperties

    broker = start_broker(BrokerConfig(data), lambda line: typer.echo(f"{line}, on {data}", err=True))
    atexit.register(broker.stop)
    return ClientProperties.at(broker.bootstrap_servers)


def _port_answers(bootstrap_servers: str) -> bool:
    """Whether anything listens at the first of `bootstrap_servers`."""
    host, _, port = bootstrap_servers.split(",")[0].rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True


def read_state(run: str | None, runs: Path) -> dict[str, str]:
    """What `runs/<run>/state.json` says, `latest` by default. Raises typer.BadParameter where there is none."""
    path = runs / (run or "latest") / "state.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = f"no run {run!r}" if run else "no run yet"
        raise typer.BadParameter(
            f"there is {what} under {runs}/ ({path} is missing): name a Kafka with --bootstrap-server, or start a run"
        ) from None
    except ValueError as error:
        raise typer.BadParameter(f"{path} is not JSON: {error}") from error
    said = {key: state.get(key) or "" for key in ("run", "bootstrap_servers", "client_properties")}
    if not said["run"] or not (said["bootstrap_servers"] or said["client_properties"]):
        raise typer.BadParameter(f"{path} does not say where the run's Kafka is; name one with --bootstrap-server")
    return said


def properties_of(brokers: str | None, command_config: Path | None) -> ClientProperties:
    """The client properties that these two options give. Raises ValueError on a bad one, OSError for a missing file."""
    from infra.kafka.properties import ClientProperties

    if command_config is None:
        return ClientProperties.at(brokers or "")
    more = {"bootstrap_servers": brokers} if brokers else {}
    return ClientProperties.from_file(command_config, **more)


def _only_run(client: ClientProperties) -> str:
    from infra.kafka.admin import admin_client, list_topics
    from schemas.topics import PREFIX, run_of

    with admin_client(client) as admin:
        runs = sorted({run for name in list_topics(admin, f"{PREFIX}.") if (run := run_of(name)) is not None})
    if len(runs) == 1:
        return runs[0]
    found = f"it holds {', '.join(runs)}" if runs else "it holds no run"
    raise typer.BadParameter(f"{found}: say which with --run", param_hint="--run")
