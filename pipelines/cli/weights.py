"""`laminar weights`: the weight versions that a run has published, from the manifests in its relay topic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from infra.kafka.reading import read_topic
from pipelines.cli.options import BrokersOption, Connection, JsonOption, PropertiesOption, RunOption, connect
from pipelines.cli.output import Report, Row, table
from pipelines.cli.record_text import utc
from schemas.plain import to_plain
from schemas.records import PolicyVersion, WeightVersion
from schemas.topics import RELAY

app = typer.Typer(no_args_is_help=True)
COLUMNS = ("version", "parent", "step", "trained", "batches", "bytes", "created", "final", "line")


@app.callback()
def weights() -> None:
    """Look at the weight versions that a run has published."""


@app.command("list")
def list_(
    run: RunOption = None,
    brokers: BrokersOption = None,
    command_config: PropertiesOption = None,
    json: JsonOption = False,
) -> Report:
    """List the weight versions of a run, oldest first; `line` tells whether the newest descends from it.

    \b
    Examples:
      laminar weights list
      laminar weights list --json | jq '.[-1].version'
    """
    to = connect(run, brokers, command_config)
    manifests = read_manifests(to)
    line = set(ancestor_line(manifests.values()))
    rows = [_listed(manifest, manifest.version in line) for manifest in manifests.values()]
    return Report(rows, lambda: table(rows, COLUMNS) if rows else f"run {to.run} has no weights yet", as_json=json)


@app.command()
def show(
    version: Annotated[
        str, typer.Argument(metavar="VERSION", help="epoch.number, or `latest`.", show_default=False)
    ] = "latest",
    run: RunOption = None,
    brokers: BrokersOption = None,
    command_config: PropertiesOption = None,
    json: JsonOption = False,
) -> Report:
    """Show a weight version's manifest: its parent, its file and digest, the batches it learned from, its tensors.

    \b
    Examples:
      laminar weights show
      laminar weights show 1.12 --json | jq .blake3
    """
    wanted = None if version == "latest" else _parsed(version)
    to = connect(run, brokers, command_config)
    manifests = read_manifests(to)
    if not manifests:
        raise RuntimeError(f"run {to.run} has no weights yet")
    if wanted is not None and wanted not in manifests:
        raise RuntimeError(f"run {to.run} has no version {wanted}: it has {min(manifests)} to {max(manifests)}")
    manifest = manifests[wanted or max(manifests)]
    return Report(to_plain(manifest), lambda: _manifest_text(manifest), as_json=json)


def read_manifests(to: Connection) -> dict[PolicyVersion, WeightVersion]:
    """The manifests in a run's relay topic, by version, oldest first. What cannot be decoded is left out."""
    rows = (row for record in read_topic(to.client, RELAY.name(to.run)) for row in record.rows)
    found = {row.version: row for row in rows if isinstance(row, WeightVersion)}
    return dict(sorted(found.items()))


def ancestor_line(manifests: Iterable[WeightVersion]) -> list[PolicyVersion]:
    """The newest version, its parent, and so on back to the first that is known."""
    parents = {manifest.version: manifest.parent for manifest in manifests}
    line: list[PolicyVersion] = []
    version = max(parents, default=None)
    while version in parents and version not in line:
        line.append(version)
        version = parents[version]
    return line


def _listed(manifest: WeightVersion, on_the_line: bool) -> Row:
    return {
        "version": str(manifest.version),
        "parent": None if manifest.parent is None else str(manifest.parent),
        "step": manifest.step,
        "trained": manifest.trajectories_trained,
        "batches": len(manifest.batches),
        "bytes": manifest.bytes,
        "created": utc(manifest.created_at),
        "final": manifest.final,
        "line": on_the_line,
    }


def _manifest_text(manifest: WeightVersion) -> str:
    lines: list[tuple[str, Any]] = [
        ("version", f"{manifest.version}{' (final)' if manifest.final else ''}"),
        ("parent", manifest.parent or "none"),
        ("step", manifest.step),
        ("created", utc(manifest.created_at)),
        ("file", f"{manifest.file}, {manifest.bytes} bytes"),
        ("blake3", manifest.blake3),
        ("batches", ", ".join(map(str, manifest.batches)) or "none"),
        ("trajectories", f"{manifest.trajectories_trained} trained so far"),
        ("tensors", len(manifest.tensors)),
    ]
    text = [f"{name:12} {value}" for name, value in lines]
    text += [f"  {tensor.dtype:5} {list(tensor.shape)!s:20} {tensor.name}" for tensor in manifest.tensors]
    return "\n".join(text)


def _parsed(text: str) -> PolicyVersion:
    try:
        return PolicyVersion.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="VERSION") from error
