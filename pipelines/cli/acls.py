"""`laminar acls`: the Kafka ACLs of a run's roles, printed as commands or created."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.option_sets import Commands
from pipelines.cli.options import JsonOption
from pipelines.present.output import Report
from pipelines.roles import ALL_PIPELINES

app = Commands()
LOCAL = "localhost:9092"


@app.command()
def acls(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's name; the run need not exist yet.")],
    apply: Annotated[bool, typer.Option("--apply", help="Create the ACLs, as an administrator.")] = False,
    brokers: Annotated[
        str | None,
        typer.Option(
            "--bootstrap-server",
            "-b",
            metavar="HOST:PORT",
            help="The Kafka brokers, also in place of FILE's; by default localhost:9092.",
        ),
    ] = None,
    command_config: Annotated[
        Path | None,
        typer.Option("--command-config", "-F", metavar="FILE", help="The administrator's Kafka client properties."),
    ] = None,
    json: JsonOption = False,
) -> Report:
    """Print the access control lists (ACLs) of a run as kafka-acls.sh commands, or create them with --apply.

    Each role has a Kafka user of its own name: one for each pipeline, `import`, `export`, and `people`, which may read
    everything, request that a replica drain, and pause the run. The lists come from the topic catalogue: they grant
    what the roles need, and no more. An administrator, who is none of these users, creates the topics.

    \b
    Examples:
      laminar acls first
      laminar acls first --apply -F guarded/secure/admin.properties
    """
    from infra.deploy.role_acls import IMPORT, role_acls
    from infra.kafka.acls import acl_command, create_acls
    from pipelines.cli.options import properties_of

    lists = role_acls(run, (*ALL_PIPELINES, IMPORT))
    if apply:
        address = brokers if command_config is not None else brokers or LOCAL
        entries = create_acls(properties_of(address, command_config), lists)
        return Report({"run": run, "entries": entries}, lambda: f"run {run}: created {entries} ACL entries", json)
    lines = [acl_command(each, brokers or LOCAL, str(command_config or "")) for each in lists]
    return Report([asdict(each) for each in lists], lambda: "\n".join(lines), as_json=json)
