"""`laminar weights`: the published weight versions of a run, from the manifests in its relay topic, and their bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.escaping import print_escaped
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import Address, JsonOption, Printing, RunClient
from pipelines.inspect.log.manifests import Manifests, ancestors
from pipelines.inspect.run_folders import config_file
from pipelines.inspect.weight_places import Places, WeightPlace, weight_places
from pipelines.present.output import Report, Row, RowOutput, utc
from schemas.plain import to_plain
from schemas.records import PolicyVersion, WeightVersion

if TYPE_CHECKING:
    from pipelines.config import Config

app = Commands(no_args_is_help=True)
VersionArgument = Annotated[
    str, typer.Argument(metavar="VERSION", help="epoch.number (1.12), or `latest`.", show_default=False)
]
StoreOption = Annotated[
    Path | None, typer.Option("--store", metavar="DIR", help="This machine's weight store; by default the run's.")
]
COLUMNS = ("version", "parent", "step", "trained", "batches", "bytes", "created", "final", "ancestor", "where")


@app.callback()
def weights() -> None:
    """List, verify, compare, pull and publish the weight versions of a run.

    \b
    Examples:
      laminar weights list
      laminar weights diff 1.3 1.4
      laminar weights pull latest best-model
    """


@app.command("list")
def list_(
    address: Address,
    printing: Printing,
    count: Annotated[int, typer.Option("-n", min=0, help="How many of the newest versions; 0: all.")] = 20,
) -> RowOutput:
    """List the newest weight versions of a run, oldest first. `ancestor`: the newest is or descends from this one.

    `where` says where this machine has the weights, for `laminar weights pull`: in the weight store (shared memory,
    while the run is active), in a relay's copies on disk (`relay.disk_folder`), in the object store
    (`relay.object_store`), in the folder of the final model, in a checkpoint, or in the run's initial model.

    \b
    Examples:
      laminar weights list
      laminar weights list -n 0 --json | jq '.[] | select(.where != []) | .version'
    """
    connection = address.open_log()
    manifests = Manifests(connection.client, connection.run).readable()
    by_version = {each.version: each for each in manifests}
    line = {each.version for each, _ in ancestors(by_version, max(by_version), None)} if by_version else set()
    places = weight_places(manifests, connection.run, address.folder)
    shown = manifests[-count:]  # all for 0
    if len(shown) < len(manifests):
        print_escaped(f"{len(manifests) - len(shown)} older versions are not shown: -n 0 shows all", err=True)
    rows = [_row(each, each.version in line, places.get(each.version, [])) for each in shown]
    return RowOutput([rows], COLUMNS, printing.form(), f"run {connection.run} has no weights yet", cells=_cells)


@app.command()
def show(
    address: Address,
    version: VersionArgument = "latest",
    json: JsonOption = False,
) -> Report:
    """Show a weight version's manifest: parent, file, digest, batches, and tensors.

    \b
    Examples:
      laminar weights show
      laminar weights show 1.12 --json | jq .blake3
    """
    _, (manifest,) = _find([version], address)
    return Report(to_plain(manifest), lambda: _manifest_text(manifest), as_json=json)


@app.command()
def verify(
    address: Address, printing: Printing, version: VersionArgument = "latest", store: StoreOption = None
) -> RowOutput:
    """Verify this machine's bytes of a version against its manifest. Exits with 1 if they differ.

    \b
    Examples:
      laminar weights verify
      laminar weights verify 1.12 --json | jq 'all(.[]; .matches)'
    """
    from pipelines.run.weight_bytes import existing_store, store_root
    from pipelines.run.weight_bytes import verify as verify_bytes

    connection, (manifest,) = _find([version], address)
    root = store_root(connection.run, _config(address.folder), store)
    with existing_store(root, address.command("weights list")) as opened:
        rows = verify_bytes(opened, manifest)
    differs = any(not row["matches"] for row in rows)
    columns = ("check", "manifest", "store", "matches")
    return RowOutput([rows], columns, printing.form(), exit_code=int(differs))


@app.command()
def diff(
    address: Address,
    printing: Printing,
    old: Annotated[str, typer.Argument(metavar="OLD", help="epoch.number.", show_default=False)],
    new: VersionArgument = "latest",
    store: StoreOption = None,
) -> RowOutput:
    """Count the elements of each tensor that differ between two versions that this machine has.

    They are read from the weight store; after the end of a run from its checkpoints and models, as by `weights pull`.

    \b
    Examples:
      laminar weights diff 1.11 1.12
    """
    from infra.store.errors import VersionGone
    from pipelines.run.weight_bytes import diff as diff_bytes
    from pipelines.run.weight_bytes import diff_folders, existing_store, store_root

    connection, (before, after) = _find([old, new], address)
    config = _config(address.folder)
    root = store_root(connection.run, config, store)
    try:
        with existing_store(root, address.command("weights list")) as opened:
            rows = diff_bytes(opened, before, after)
    except VersionGone:
        if config is None:
            raise
        places = _places(connection, address)
        with TemporaryDirectory() as pulled:
            folders = [Path(pulled, name) for name in ("old", "new")]
            for each, folder in zip((before, after), folders, strict=True):
                if not _pull_here(root, each, config, places, Path(config.model.path), folder):
                    raise VersionGone(f"version {each.version} is gone: {_available(places)}") from None
            rows = diff_folders(*folders)
    return RowOutput(
        [rows],
        ("tensor", "elements", "changed", "share"),
        printing.form(),
        cells=lambda row: {**row, "share": f"{100 * row['share']:.3f} %"},
    )


@app.command()
def pull(
    address: Address,
    version: VersionArgument,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.", show_default=False)],
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", metavar="DIR", help="The folder of configuration and tokenizer; by default the run's model."
        ),
    ] = None,
    store: StoreOption = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only the adapters of a LoRA run, for peft, vLLM or SGLang.")
    ] = False,
    json: JsonOption = False,
) -> Report:
    """Write a version to a Hugging Face folder, from where this machine has it (see `laminar weights list`) or a relay.

    A checkpoint is converted. So every checkpoint becomes a model that transformers and vLLM load. With `--adapter` a
    checkpoint of a LoRA run becomes a folder of adapters, with the BLAKE3 of the weight files that they are for.

    \b
    Examples:
      laminar weights pull latest best-model
      laminar weights pull 1.12 out --model models/base
      laminar weights pull 1.12 adapters --adapter
    """
    from pipelines.cli.relays import read_chain
    from pipelines.run.weight_bytes import pull_from_relays, store_root

    connection, (manifest,) = _find([version], address)
    config = _config(address.folder)
    base = model or (Path(config.model.path) if config is not None else Path())
    places = _places(connection, address, store)
    if adapter:
        return _pull_adapters(config, places, manifest, base, folder, as_json=json)
    source = _pull_here(store_root(connection.run, config, store), manifest, config, places, base, folder)
    if source is None:
        from operators.relay.config import RelayConfig
        from pipelines.shards import with_relay_token

        relay = RelayConfig()
        if config is not None and address.folder is not None:
            relay = with_relay_token(config, address.folder).relay
        chain = None if connection.client.log is not None else read_chain(connection)
        source = pull_from_relays(connection.run, manifest, chain, relay, base, folder, _available(places))
    data = {"version": str(manifest.version), "folder": str(folder), "bytes": manifest.bytes, "from": source}
    return Report(data, lambda: f"wrote version {manifest.version} to {folder}, from {source}", as_json=json)


def _pull_here(
    root: Path, manifest: WeightVersion, config: Config | None, places: Places, base: Path, folder: Path
) -> str | None:
    """Write a version to the new `folder` from the store `root` or another place of `places`; return which."""
    from pipelines.run.weight_bytes import pull_from_objects, pull_from_store
    from pipelines.run.weight_copies import pull_from_place

    known = places.get(manifest.version, [])
    stores = [root, *(Path(str(place.path)).parent for place in known if place.kind == "disk")]
    source = next(filter(None, (pull_from_store(store, manifest, base, folder) for store in stores)), None)
    if source is not None or config is None:
        return source
    objects = (place.path for place in known if place.kind == "object store")
    source = next(filter(None, (pull_from_objects(file, manifest, base, folder) for file in objects)), None)
    if source is not None:
        return source
    found = (pull_from_place(place, config, base, folder) for place in known)
    return next(filter(None, found), None)


def _pull_adapters(
    config: Config | None, places: Places, manifest: WeightVersion, base: Path, folder: Path, *, as_json: bool
) -> Report:
    from pipelines.run.weight_copies import pull_adapters

    if config is None:
        raise typer.BadParameter("--adapter needs the folder of the run, which this machine does not have")
    version = str(manifest.version)
    source = pull_adapters(places.get(manifest.version, []), config, base, folder, version)
    data = {"version": version, "folder": str(folder), "from": source}
    return Report(data, lambda: f"wrote the adapters of version {version} to {folder}, from {source}", as_json=as_json)


@app.command()
def publish(
    address: Address,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A Hugging Face folder.", show_default=False)],
    store: StoreOption = None,
    json: JsonOption = False,
) -> Report:
    """Publish the weights in a Hugging Face folder as a run's newest version. Run it on the trainer's machine.

    The trainer must have started once: it publishes the initial model first.

    \b
    Examples:
      laminar weights publish best-model
    """
    from pipelines.config import Config
    from pipelines.run.weight_bytes import publish as publish_bytes
    from pipelines.run.weight_bytes import store_root

    connection = address.connect()
    connection.check_has_started("trainer", "publish the weights")
    config = _config(address.folder)
    relay = (config or Config()).relay
    manifests = Manifests(connection.client, connection.run)
    newest = manifests[max(manifests)] if manifests else None
    root = store_root(connection.run, config, store)
    run, client = connection.run, connection.client
    version = publish_bytes(run, client, root, relay.keep_versions, newest, folder, relay.chunk_bytes)
    data = {"version": str(version), "store": str(root)}
    return Report(data, lambda: f"published {folder} as version {version} of run {run}, in {root}", as_json=json)


def _find(versions: list[str], address: Address) -> tuple[RunClient, list[WeightVersion]]:
    """Return the connection and the manifests of `versions`. Raises as `find_version` does."""
    for version in versions:
        _named(version, ())  # reject an invalid version before connecting
    connection = address.open_log()
    manifests = Manifests(connection.client, connection.run)
    return connection, [manifests[find_version(connection, manifests, version)] for version in versions]


def find_version(
    connection: RunClient, manifests: Mapping[PolicyVersion, WeightVersion], version: str
) -> PolicyVersion:
    """Return the version that `version` names: `latest`, epoch.number or v12.

    Raises typer.BadParameter for an invalid version, RuntimeError if the run does not have it.
    """
    found = _named(version, manifests)
    if not manifests:
        raise RuntimeError(f"run {connection.run} has no weights yet")
    if found is None:
        raise RuntimeError(
            f"run {connection.run} has no version {version}; its versions: {min(manifests)} to {max(manifests)}"
        )
    return found


def _config(folder: Path | None) -> Config | None:
    """Return the configuration of the run in `folder`; None if there is none."""
    from pipelines.config import load_config

    file = None if folder is None else config_file(folder)
    return None if file is None else load_config(file)


def _places(connection: RunClient, address: Address, store: Path | None = None) -> Places:
    """Return where this machine has the versions of the run."""
    manifests = Manifests(connection.client, connection.run).readable()
    return weight_places(manifests, connection.run, address.folder, store)


def _available(places: Places) -> str:
    """Return which versions this machine has, as a part of an error."""
    listed = [f"{version} ({', '.join(sorted(map(str, found)))})" for version, found in sorted(places.items())]
    return f"this machine has {', '.join(listed)}" if listed else "this machine has none of its versions"


def _cells(row: Row) -> Row:
    return {**row, "where": ", ".join(map(_shortest, row["where"])) or "gone"}


def _shortest(place: str) -> str:
    """Return a path relative to the working directory if it is in it."""
    path = Path(place)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else place


def _row(manifest: WeightVersion, ancestor: bool, places: Iterable[WeightPlace]) -> Row:
    return {
        "version": str(manifest.version),
        "parent": None if manifest.parent is None else str(manifest.parent),
        "step": manifest.step,
        "trained": manifest.trajectories_trained,
        "batches": len(manifest.batches),
        "bytes": manifest.bytes,
        "created": utc(manifest.created_at),
        "final": manifest.final,
        "ancestor": ancestor,
        "where": [str(place) for place in places],
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


def _named(text: str, versions: Collection[PolicyVersion]) -> PolicyVersion | None:
    from schemas.records.versions import named_version

    try:
        return named_version(text, versions)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="VERSION") from error
