"""`laminar acls`: what each role of a run may do on Kafka, as commands, or put into force."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.options import JsonOption
from pipelines.present.output import Report
from pipelines.roles import PIPELINES

app = typer.Typer()


@app.command()
def acls(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run, by name; it need not be there yet.")],
    apply: Annotated[bool, typer.Option("--apply", help="Put them into force instead, as an administrator.")] = False,
    brokers: Annotated[
        str, typer.Option("--bootstrap-server", "-b", metavar="HOST:PORT", help="Kafka.")
    ] = "localhost:9092",
    command_config: Annotated[
        Path | None, typer.Option("--command-config", "-F", metavar="FILE", help="The administrator's properties.")
    ] = None,
    json: JsonOption = False,
) -> Report:
    """Print the access control lists of a run's users, which are named as their roles, as commands for kafka-acls.sh.

    Read from the catalogue of topics, so they are what the pipelines need, and no more. Users are the pipelines,
    `import`, `export`, and `people`, who look at everything and may ask a replica to drain. Topics are made by an
    administrator, who is no user of these.

    \b
    Examples:
      laminar acls first
      laminar acls first --apply -F guarded/secure/admin.properties
    """
    from infra.deploy.role_acls import role_acls
    from infra.kafka.acls import command, put_into_force
    from infra.kafka.properties import ClientProperties
    from pipelines.cli.broker import IMPORT

    lists = role_acls(run, (*PIPELINES, IMPORT))
    if apply:
        client = ClientProperties.at(brokers) if command_config is None else ClientProperties.from_file(command_config)
        entries = put_into_force(client, lists)
        return Report({"run": run, "entries": entries}, lambda: f"run {run}: {entries} entries are in force", json)
    lines = [command(each, brokers, str(command_config or "")) for each in lists]
    return Report([asdict(each) for each in lists], lambda: "\n".join(lines), as_json=json)
