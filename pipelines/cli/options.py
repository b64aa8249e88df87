"""Options that commands share: the run, its Kafka, and the output format."""

from __future__ import annotations

import atexit
import math
import shlex
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

import typer

from infra.escaping import print_escaped
from pipelines.inspect.run_folders import (
    RUNS,
    NoSuchRun,
    config_file,
    find_run,
    folder_of,
    laminar_command,
    read_run,
    run_argument,
)
from pipelines.present.output import Form
from schemas.release import OldRelease

if TYPE_CHECKING:
    from infra.kafka.properties import ClientProperties

CONNECT_TIMEOUT_S = 5.0
OWN_BROKER_S = 10.0
"""How long a command waits for a run's own broker, which may be starting or stopping."""
POLL_S = 0.1

RunOption = Annotated[
    str | None,
    typer.Option("--run", metavar="NAME", help="A run under ./runs, or DIR/NAME; by default the latest under ./runs."),
]
RunsFolder = Annotated[Path, typer.Option("--folder", metavar="DIR", help="The folder of the runs.")]
LastOption = Annotated[int, typer.Option("-n", "--count", min=0, help="How many of the last entries.")]
FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Continue with new output until stopped.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
ColourOption = Annotated[
    Literal["logprob", "version", "none"], typer.Option("--colour", help="What a token's colour shows.")
]
ModelOption = Annotated[
    Path | None,
    typer.Option("--model", metavar="DIR", help="The tokenizer's model folder; by default the run's model."),
]


def finite(value: float | None) -> float | None:
    """The callback of an option that takes a number. Raises typer.BadParameter for nan and inf."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


TrainGpus = Annotated[
    int | None, typer.Option("--train-gpus", min=1, help="GPUs of the trainer; by default trainer.ranks.")
]
ReplicaGpus = Annotated[
    int | None, typer.Option("--replica-gpus", min=1, help="GPUs of a replica; by default rollout.tensor_parallel.")
]
Calibrate = Annotated[
    Path | None,
    typer.Option("--calibrate", metavar="RUN", help="Predict with the engine and trainer of this run's folder."),
]
GpuHour = Annotated[float, typer.Option("--gpu-hour", min=0, callback=finite, help="Price of an hour of a GPU.")]


@dataclass(frozen=True)
class RunClient:
    """A run, and the client properties of its Kafka."""

    run: str
    client: ClientProperties

    def check_has_started(self, role: str, then: str) -> None:
        """Raise RuntimeError before the first commit of `role`: it would refuse topics that somebody else has begun.

        `then` says what to do once the role has started.
        """
        from pipelines.inspect.audit.audit_run import committed_notes
        from schemas.topics import RESTORE, group_name

        if group_name(self.run, role) not in committed_notes(self.client, RESTORE.name(self.run)):
            raise RuntimeError(f"{role} of run {self.run} has not started yet; {then} once it has")


@dataclass(frozen=True)
class Printing:
    """The options for the format of printed rows."""

    output: Annotated[Form | None, typer.Option("--output", "-O", help="Output format; by default readable text.")] = (
        None
    )
    json: JsonOption = False

    def form(self, otherwise: Form = "table", *, follow: bool = False) -> Form:
        """Return the requested output format. Raises typer.BadParameter for JSON with `follow`."""
        return output_form(self.output, self.json, otherwise, follow)


def output_form(output: Form | None, json: bool, otherwise: Form, follow: bool) -> Form:
    """Return the output format that -O and --json request. Raises typer.BadParameter for one JSON document of a command
    that does not end, with `follow`."""
    form = output or ("json" if json else otherwise)
    if follow and form == "json":
        raise typer.BadParameter(
            "one JSON document ends with the command: with --follow give -O jsonl, a JSON document a line",
            param_hint="--json",
        )
    return form


@dataclass(frozen=True)
class Brokers:
    """The options for the address of Kafka."""

    brokers: Annotated[
        str | None,
        typer.Option("--bootstrap-server", "-b", metavar="HOST:PORT", help="Kafka's address; by default the run's."),
    ] = None
    command_config: Annotated[
        Path | None,
        typer.Option(
            "--command-config", "-F", metavar="FILE", help="Kafka client properties, in the format of Kafka's tools."
        ),
    ] = None

    @property
    def given(self) -> bool:
        return bool(self.brokers or self.command_config)

    def client(self) -> ClientProperties:
        """Return the client properties. Raises ValueError for an invalid property, OSError for a missing file."""
        return properties_of(self.brokers, self.command_config)


@dataclass(frozen=True)
class Address(Brokers):
    """The options for the run and the address of its Kafka."""

    run: RunOption = None

    @property
    def folder(self) -> Path | None:
        """The run's folder on this machine; None if there is none, or if only the brokers are given."""
        if self.given and self.run is None:
            return None
        try:
            folder = folder_of(RUNS, self.run)
        except NoSuchRun:
            return None
        return folder if folder.is_dir() else None

    @property
    def transaction_timeout_s(self) -> float:
        """Of the configuration in the run's folder; the default if there is none, or this release cannot read it."""
        from pipelines.config import ConfigError, KafkaConfig, load_config

        with suppress(ConfigError):
            if (folder := self.folder) is not None and (file := config_file(folder)) is not None:
                return load_config(file).kafka.transaction_timeout_s
        return KafkaConfig.transaction_timeout_s

    def command(self, words: str) -> str:
        """Return the command `laminar WORDS` for the same run and Kafka, as the user must write it."""
        given = {"--run": self.run, "-b": self.brokers, "-F": self.command_config and str(self.command_config)}
        options = [f"{name} {shlex.quote(value)}" for name, value in given.items() if value]
        return " ".join([laminar_command(), words, *options])

    def connect(self) -> RunClient:
        """Return the run and its Kafka, once a broker has responded. Raises as `connect` does."""
        return connect(self.run, self.brokers, self.command_config)

    def pinned(self) -> Self:
        """The same with the run that is the latest now: another one may start while a command lasts."""
        folder = self.folder
        return self if self.given or folder is None else replace(self, run=run_argument(folder.resolve()))

    def stopped_log(self) -> ClientProperties | None:
        """The log of a run of this machine that has ended, with its own broker, as files; None for others.

        Also None while the run's state cannot be read.
        """
        if self.given or (folder := self.folder) is None or not (data := folder / "kafka").is_dir():
            return None
        try:
            if not _is_stopped(data.resolve()) or read_run(folder).status == "running":
                return None
        except (NoSuchRun, ValueError, OldRelease, OSError):
            return None
        from infra.kafka.properties import ClientProperties

        return ClientProperties.of_log(data.resolve() / "log")

    def open_log(self) -> RunClient:
        """As `connect`, for a command that only reads: the log of a stopped run of this machine is read from its files.

        No broker starts then, and the properties of the connection open no client but readers.
        """
        return connect(self.run, self.brokers, self.command_config, read_only=True)


@dataclass(frozen=True)
class TransactionalAddress(Address):
    """The same for a command that depends on how long the run's transactions may be open, also in a container."""

    transaction_timeout: Annotated[
        float | None,
        typer.Option(
            "--transaction-timeout",
            min=1,
            max=3600,
            metavar="SECONDS",
            callback=finite,
            help="The run's kafka.transaction_timeout_s; by default that of its configuration on this machine, or 60.",
        ),
    ] = None

    @property
    def transaction_timeout_s(self) -> float:
        """The one given, else as that of Address."""
        return self.transaction_timeout or super().transaction_timeout_s


@dataclass(frozen=True)
class ExportedRun(Address):
    """The same for the run that an export is of."""

    run: Annotated[
        str | None, typer.Option("--run", metavar="DIR/NAME", help="Its run; by default that of its name under ./runs.")
    ] = None


class RunStarting(RuntimeError):
    """The run has no topics yet."""


def connect(
    run: str | None,
    brokers: str | None,
    command_config: Path | None,
    runs: Path | None = None,
    *,
    read_only: bool = False,
) -> RunClient:
    """Return the run and the Kafka of these options, once a broker has responded; `read_only`: see `Address.open_log`.

    Without `run` it is the latest under `runs` (./runs), or the only one on the brokers. Raises typer.BadParameter if
    the options do not determine the run, BrokerUnreachable if Kafka does not respond, ValueError for a bad property.
    """
    from infra.kafka.properties import ClientProperties
    from infra.kafka.readiness import BrokerUnreachable, connection_problem

    deadline, by_path = time.monotonic() + OWN_BROKER_S, run is not None and "/" in run
    state = {} if (brokers or command_config) and not by_path else read_state(run, runs or RUNS)
    if state.get("client_properties") and not (brokers or command_config):
        command_config = Path(state["client_properties"])
    client = properties_of(brokers or state.get("bootstrap_servers"), command_config)
    data = None if brokers or command_config else _broker_data(run, runs or RUNS)
    while True:
        if data is not None and _is_stopped(data):
            if read_only:
                return RunClient(state.get("run") or run or "", ClientProperties.of_log(data / "log"))
            if find_run(runs or RUNS, run).status == "running":  # its supervisor starts the broker, after its checks
                if time.monotonic() >= deadline:
                    raise BrokerUnreachable("the run is starting, and its own broker is not up: try again in a moment")
                time.sleep(POLL_S)
                continue
            client = _start_broker_again(data)
        if (reason := connection_problem(client.admin(), CONNECT_TIMEOUT_S)) is None:
            return RunClient(state.get("run") or _run_on(client, run), client)
        if data is None:
            raise BrokerUnreachable(f"Kafka does not respond: {reason}. Check that it runs, and its address.")
        if time.monotonic() >= deadline:
            raise BrokerUnreachable(f"the run's own broker is starting or stopping: {reason}. Try again in a moment.")
        time.sleep(POLL_S)


def _broker_data(run: str | None, runs: Path) -> Path | None:
    """Return the data folder of the broker that `laminar run` started for this run; None if it started none."""
    folder = folder_of(runs, run) / "kafka"
    return folder.resolve() if folder.is_dir() else None


def _start_broker_again(data: Path) -> ClientProperties:
    """Start a broker on the data of a run whose own broker has stopped, until this command ends."""
    from infra.kafka.broker import BrokerConfig, start_broker
    from infra.kafka.properties import ClientProperties

    broker = start_broker(BrokerConfig(data), lambda line: print_escaped(f"{line}, on {data}", err=True))
    atexit.register(broker.stop)
    return ClientProperties.at(broker.bootstrap_servers)


def _is_stopped(data: Path) -> bool:
    """Return whether no broker runs on the folder `data`."""
    from infra.kafka.broker import running_broker

    return running_broker(data) is None


def read_state(run: str | None, runs: Path) -> dict[str, str]:
    """Return name and Kafka address of a run from its folder, of `laminar run` and of `submit --detach` alike.

    Raises typer.BadParameter, and OldRelease for a run of release 0.1.0.
    """
    try:
        found = find_run(runs, run)
    except (NoSuchRun, ValueError) as error:
        raise typer.BadParameter(f"{error}; or give --bootstrap-server") from None
    state = {key: found.state.get(key) or "" for key in ("run", "bootstrap_servers", "client_properties")}
    if found.status == "running" and not (state["bootstrap_servers"] or state["client_properties"]):
        raise RunStarting(f"run {found.run} is starting and has no topics yet: try again in a moment")
    if not state["run"] or not (state["bootstrap_servers"] or state["client_properties"]):
        if found.supervised and config_file(found.folder) is None:
            raise typer.BadParameter(f"run {found.run} ended before its topics were created: name another with --run")
        raise typer.BadParameter(f"{found.folder} has no address of the run's Kafka: give --bootstrap-server")
    return state


def properties_of(brokers: str | None, command_config: Path | None) -> ClientProperties:
    """Return the client properties of these options. Raises ValueError for an invalid one, OSError for no file."""
    from infra.kafka.properties import ClientProperties

    if command_config is None:
        return ClientProperties.at(brokers or "")
    more = {"bootstrap_servers": brokers} if brokers else {}
    return ClientProperties.from_file(command_config, **more)


def _run_on(client: ClientProperties, run: str | None) -> str:
    """Return `run`, or the only run of this Kafka.

    Raises typer.BadParameter if there are others, OldRelease for a run of release 0.1.0, which had a topic `offers`.
    """
    from infra.kafka.admin import admin_client, list_topics
    from schemas.topics import PREFIX, run_of

    with admin_client(client) as admin:
        names = list_topics(admin, f"{PREFIX}.")
    runs = sorted({found for name in names if (found := run_of(name)) is not None})
    if run is None and len(runs) != 1:
        known = f"this Kafka has the runs {', '.join(runs)}" if runs else "this Kafka has no run"
        raise typer.BadParameter(f"{known}: choose one with --run", param_hint="--run")
    chosen = runs[0] if run is None else run
    if (old := f"{PREFIX}.{chosen}.offers") in names:
        raise OldRelease(f"topic {old}")
    return chosen
