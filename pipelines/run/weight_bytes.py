"""The weight bytes of `laminar weights`: verify, compare, pull to a folder, publish from a folder."""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from infra.files import new_folder
from infra.kafka.producer import BoundedProducer
from infra.kafka.properties import ClientProperties
from infra.storage import RangeReader, StorageFolder
from infra.store.announce import ManifestLog
from infra.store.chunks import chunk_checksums
from infra.store.errors import StoreError, VersionGone
from infra.store.layout import Layout
from infra.store.names import default_root
from infra.store.newest_copier import PART
from infra.store.publisher import Publisher
from infra.store.sealed_objects import has_version
from infra.store.weight_files import SINGLE, folder_tensors, tensors_in
from infra.store.weight_store import WeightStore
from infra.transport.fetch import download
from infra.transport.frames import TransportError
from infra.transport.handshake import token_problem
from operators.relay.config import RelayConfig
from pipelines.config import Config
from pipelines.present.output import Row
from pipelines.run.weight_copies import COPIED
from schemas.records import PolicyVersion, RelayChain, TensorSpec, WeightVersion

TensorsByName = Mapping[str, tuple[TensorSpec, np.ndarray]]


def store_root(run: str, config: Config | None, given: Path | None) -> Path:
    """Return the folder of this machine's weight store: `given`, else relay.store of `config`, else the default."""
    if given is not None:
        return given
    configured = "" if config is None else config.relay.store
    return Path(configured) if configured not in ("", "auto") else default_root(run)


def existing_store(root: Path, list_command: str) -> WeightStore:
    """Open the weight store in `root`, and create none. Raises VersionGone, with `list_command`, if there is none."""
    if not root.is_dir():
        raise VersionGone(
            f"there is no weight store {root}: a run removes its store when it ends; "
            f"`{list_command}` shows where its versions are, `weights pull` writes one to a folder"
        )
    return WeightStore(root)


def verify(store: WeightStore, manifest: WeightVersion) -> list[Row]:
    """Return a row for each check of the bytes in `store` against `manifest`. Raises VersionGone."""
    with store.read(manifest.version) as data:
        layout = Layout(manifest.tensors)
        checks: list[tuple[str, Any, Any]] = [
            ("bytes", manifest.bytes, len(data)),
            ("blake3", manifest.blake3, blake3(data, max_threads=blake3.AUTO).hexdigest()),
            ("tensors", True, layout.matches(data)),
        ]
        if manifest.chunk_checksums:
            checksums = chunk_checksums(data, manifest.chunk_bytes)
            matching = sum(each == actual for each, actual in zip(manifest.chunk_checksums, checksums, strict=False))
            checks.append(("matching chunks", len(manifest.chunk_checksums), matching))
    return [
        {"check": name, "manifest": expected, "store": actual, "matches": expected == actual}
        for name, expected, actual in checks
    ]


def diff(store: WeightStore, old: WeightVersion, new: WeightVersion) -> list[Row]:
    """Return the changed elements of each tensor between two versions, most changed first. Raises VersionGone."""
    with store.read(old.version) as before, store.read(new.version) as after:
        return _differences(tensors_in(before), tensors_in(after))


def diff_folders(old: Path, new: Path) -> list[Row]:
    """As `diff`, of two Hugging Face folders."""
    return _differences(folder_tensors(old), folder_tensors(new))


def _differences(old: TensorsByName, new: TensorsByName) -> list[Row]:
    rows: list[Row] = []
    for name in [*old, *(name for name in new if name not in old)]:
        if name not in old or name not in new or old[name][0] != new[name][0]:
            rows.append({"tensor": name, "elements": None, "changed": None, "share": 1.0})
            continue
        spec, data = new[name]
        elements = int(np.prod(spec.shape))
        width = len(data) // max(1, elements)
        changed = (data != old[name][1]).reshape(-1, max(1, width)).any(axis=1).sum()
        share = float(changed) / max(1, elements)
        rows.append({"tensor": name, "elements": elements, "changed": int(changed), "share": share})
    return sorted(rows, key=lambda row: -row["share"])


def pull_from_store(root: Path, manifest: WeightVersion, model: Path, folder: Path) -> str | None:
    """Write a version in the store `root` to the new `folder` for `from_pretrained`, with the other files of `model`.

    Returns the source; None if the store does not have the version. Raises FileExistsError, FileNotFoundError for a
    model folder without configuration.
    """
    if not root.is_dir():
        return None
    try:
        version = manifest.version, manifest.blake3
        with WeightStore(root) as store, store.read(*version) as data, _beside(model, folder) as file:
            file.write_bytes(data)
    except VersionGone:
        return None
    return str(root)


def pull_from_objects(source: StorageFolder, manifest: WeightVersion, model: Path, folder: Path) -> str | None:
    """As `pull_from_store`, from the file `source` of an object store.

    Raises StoreError for bytes that do not match the manifest, OSError if the object store refuses.
    """
    if not has_version(source.parent, manifest.version, manifest.blake3):
        return None
    digest = blake3()
    with RangeReader(source) as reader, _beside(model, folder) as file, file.open("wb") as out:
        part = memoryview(bytearray(min(PART, manifest.bytes)))
        for begin in range(0, manifest.bytes, PART):
            read = part[: manifest.bytes - begin]
            try:
                reader.read_into(begin, read)
            except ValueError as error:
                raise StoreError(f"version {manifest.version} is damaged: {error}") from error
            digest.update(read)
            out.write(read)
        if digest.hexdigest() != manifest.blake3:
            raise StoreError(
                f"version {manifest.version} is damaged: {source} does not have the blake3 of its manifest"
            )
    return str(source)


def pull_from_relays(
    run: str,
    manifest: WeightVersion,
    chain: RelayChain | None,
    relay: RelayConfig,
    model: Path,
    folder: Path,
    elsewhere: str,
) -> str:
    """As `pull_from_store`, from the relays in `chain`; `elsewhere` says which versions can be pulled without them.

    Raises StoreError without relays, TransportError, and as `pull_from_store`.
    """
    if chain is None or not chain.links:
        raise StoreError(
            f"version {manifest.version} is gone, and run {run} has no relays: {elsewhere}. "
            "trainer.checkpoint_every and trainer.checkpoints_kept keep more versions"
        )
    token = relay.token()
    if problem := token_problem(token):
        raise TransportError(f"{problem}: {elsewhere}")
    with _beside(model, folder) as file, file.open("xb+") as out:
        out.truncate(manifest.bytes)
        with mmap.mmap(out.fileno(), manifest.bytes) as memory, memoryview(memory) as view:
            try:
                download(manifest, chain, run, token, view, relay.tls())
            except TransportError as error:
                raise TransportError(f"{error}: {elsewhere}") from error
    return f"{len(chain.links)} relays"


@contextmanager
def _beside(model: Path, folder: Path) -> Iterator[Path]:
    """The weight file to write in the new `folder`, which gets configuration and tokenizer of `model`."""
    if not (model / "config.json").is_file():
        raise FileNotFoundError(f"{model} has no config.json: give the run's model folder with --model")
    with new_folder(folder) as unfinished:
        yield unfinished / SINGLE
        for path in sorted(path for pattern in COPIED for path in model.glob(pattern)):
            if path.name != "model.safetensors.index.json":
                shutil.copyfile(path, unfinished / path.name)


def publish(
    run: str,
    client: ClientProperties,
    root: Path,
    keep: int,
    newest: WeightVersion | None,
    folder: Path,
    chunk_bytes: int,
) -> PolicyVersion:
    """Publish the weights in the Hugging Face folder `folder` as the version after `newest`; return that version.

    Raises StoreBusy while the run's trainer publishes from this machine, ValueError if the tensors are not those of the
    run's model, and PublishFailed.
    """
    tensors = folder_tensors(folder)
    specs = [spec for spec, _ in tensors.values()]
    if newest is not None and set(specs) != set(newest.tensors):
        different = sorted({spec.name for spec in set(specs) ^ set(newest.tensors)})[:3]
        raise ValueError(
            f"the weights in {folder} are not of this run's model; different tensors: {', '.join(different)}"
        )
    parent = None if newest is None else newest.version
    before = parent or PolicyVersion(0, 0)
    version = PolicyVersion(before.epoch, before.number + 1)
    producer = BoundedProducer(client)
    with ExitStack() as stack:
        stack.callback(producer.close, timeout_s=5)
        store, log = stack.enter_context(WeightStore(root, keep)), ManifestLog(producer, run)
        publisher = stack.enter_context(closing(Publisher(store, log, specs, parent, chunk_bytes=chunk_bytes)))
        publisher.publish(
            {name: data for name, (_, data) in tensors.items()},
            version,
            step=0 if newest is None else newest.step,
            batches=(),
            batch_offsets=() if newest is None else newest.batch_offsets,
            trajectories_trained=0 if newest is None else newest.trajectories_trained,
        )
    return version
