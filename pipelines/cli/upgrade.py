"""`laminar runs upgrade`: the end of an upgrade of a run's roles one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines.cli.options import Address, JsonOption
from pipelines.present.output import Report

if TYPE_CHECKING:
    from pipelines.run.upgrade import OlderRole


def upgrade_command(
    address: Address,
    ended: Annotated[
        list[str] | None,
        typer.Option("--ended", metavar="ROLE", help="A role that is gone for good, such as rollout.5; repeatable."),
    ] = None,
    json: JsonOption = False,
) -> Report:
    """Let a run's roles write the records of this release, once none of an older release is left.

    To upgrade a run without a stop, replace its roles one by one, in any order. As long as older ones are in it, new
    ones write what those read, and an older one may come back. This command ends that: it exits with 1, and names
    them, if the last commit of a role was made by an older release. Roles write newer records from their next start
    on; relays of both protocols understand each other until then. `laminar runs resume` does it by itself.

    \b
    Examples:
      laminar runs upgrade --run first
      laminar runs upgrade --run first --ended rollout.5 --ended rollout.6
    """
    from infra.kafka.run_release import read_release
    from pipelines.run.upgrade import StillOlder, upgrade
    from schemas.release import FIRST, NEWEST

    connection = address.connect()
    before = read_release(connection.client, connection.run) or FIRST
    left: tuple[OlderRole, ...] = ()
    try:
        upgrade(connection.client, connection.run, ended or ())
    except StillOlder as older:
        left = older.roles
    data: dict[str, Any] = {
        "run": connection.run,
        "before": before,
        "release": before if left else NEWEST,
        "older_roles": [
            {"role": role.name, "release": role.release, "committed_at": role.committed_at} for role in left
        ],
    }
    return Report(data, lambda: "\n".join(_lines(data, left, address)), json, exit_code=1 if left else 0)


def _lines(data: dict[str, Any], left: tuple[OlderRole, ...], address: Address) -> Iterator[str]:
    from pipelines.present.output import utc

    if not left:
        if data["before"] == data["release"]:
            yield f"run {data['run']} has release {data['release']} already"
        else:
            yield f"run {data['run']} has release {data['release']} now, from the next start of each role on"
        return
    yield f"run {data['run']} still has roles of an older release:"
    for role in left:
        yield f"  {role.name:16} {role.release}, last commit {utc(role.committed_at)} UTC"
    yield f"replace them, or name those that are gone: {address.command('runs upgrade')} --ended {left[0].name}"
